"""Functions as commands: how types, defaults and names are read, and what mistakes say."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest

from bifolio.cli.commands import App, BadParameter, Exit, argument, echo, option
from cli_runner import CliRunner, Result

SEEN: dict[str, Any] = {}


def paint(
    source: Annotated[str | None, argument(help="What to paint.")] = None,
    width: Annotated[int, option("--width", "-w", min=1, help="100 % is normal.")] = 3,
    scale: Annotated[float | None, option("--scale")] = None,
    colour: Annotated[list[str] | None, option("--colour", help="May be repeated.")] = None,
    target: Annotated[Path | None, option("--target", "-o")] = None,
    key: Annotated[str | None, option("--key", variable="PAINT_KEY")] = None,
    dry: Annotated[bool, option("--dry", help="Only say it.")] = False,
    frame_it: Annotated[bool, option(help="With a frame.")] = True,
) -> None:
    SEEN.update(locals())
    if width == 99:
        raise BadParameter("99 is too wide: use 98")
    if width == 77:
        raise Exit(7)
    echo(f"painting {source}")


def copy(files: Annotated[list[Path], argument(help="What to copy.")]) -> None:
    """Copy files."""
    SEEN.update(locals())


def app() -> App:
    shop = App("shop", "Do things.", version="shop 1")
    shop.command(help="Paint.\n\nIn colours.", epilog="50 % off")(paint)
    office = App("office", "Paper.")
    office.command()(copy)
    shop.add_app(office)
    return shop


def run(*arguments: str) -> Result:
    SEEN.clear()
    return CliRunner().invoke(app(), arguments, catch_exceptions=False)


def test_defaults() -> None:
    assert run("paint").stdout == "painting None\n"
    assert SEEN == {"source": None, "width": 3, "scale": None, "colour": None, "target": None, "key": None,
                    "dry": False, "frame_it": True}  # fmt: skip


def test_values_have_the_types_of_the_function() -> None:
    run(
        "paint",
        "-w4",
        "--scale=-0.5",
        "--colour",
        "red",
        "wall",
        "--colour",
        "-1",
        "-o",
        "x/y",
        "--dry",
        "--no-frame-it",
    )
    assert {"source": "wall", "width": 4, "scale": -0.5, "colour": ["red", "-1"], "target": Path("x/y"),
                    "key": None, "dry": True, "frame_it": False} == SEEN  # fmt: skip


@pytest.mark.parametrize("arguments", [("-", "-w", "5"), ("-w", "5", "-")])
def test_an_argument_may_stand_anywhere(arguments: tuple[str, ...]) -> None:
    assert run("paint", *arguments).exit_code == 0
    assert (SEEN["source"], SEEN["width"]) == ("-", 5)


def test_after_two_dashes_everything_is_an_argument() -> None:
    run("paint", "--", "--dry")
    assert (SEEN["source"], SEEN["dry"]) == ("--dry", False)


def test_the_environment_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAINT_KEY", "secret")
    run("paint")
    assert SEEN["key"] == "secret"
    run("paint", "--key", "other")
    assert SEEN["key"] == "other"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("paint", "--width", "wide"), "wide"),
        (("paint", "--width", "0"), "0 is below 1"),
        (("paint", "--widt", "2"), "--widt"),
        (("paint", "a", "b"), "b"),
        (("paint", "-w", "99"), "99 is too wide: use 98"),
        (("office", "copy"), "FILES"),
        (("office", "burn"), "choose one of copy"),
        (("sing",), "choose one of paint, office"),
        (("--loud",), "--loud"),
    ],
)
def test_mistakes_end_with_code_2_and_say_what_is_wrong(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_other_codes_and_several_files() -> None:
    assert run("paint", "-w", "77").exit_code == 7
    assert run("office", "copy", "a", "b").exit_code == 0
    assert SEEN["files"] == [Path("a"), Path("b")]


def test_help_and_version() -> None:
    assert run("--version").stdout == "shop 1\n"
    whole = run("--help")
    assert whole.exit_code == 0
    assert "paint" in whole.stdout
    assert "Paper." in whole.stdout
    assert run().exit_code == 2
    one = run("paint", "-h").stdout
    for text in (
        "In colours.",
        "50 % off",
        "100 % is normal. [default: 3]",
        "--no-frame-it",
        "shop paint [options] [SOURCE]",
    ):
        assert text in one
    assert "Copy files." in run("office").stdout


@dataclass(frozen=True)
class Frame:
    """Options that several verbs share."""

    HEADING: ClassVar[str] = "the frame"

    material: Annotated[str, option("--material", help="Wood or metal.")] = "wood"
    nails: Annotated[int | None, option("--nails", min=1)] = None


@dataclass(frozen=True)
class GoldenFrame(Frame):
    """The same with another default and one option more."""

    material: Annotated[str, option("--material", help="Wood or metal.")] = "gold"
    carved: Annotated[bool, option("--carved")] = False


def hang(frame: Frame, place: Annotated[str, argument()], high: Annotated[bool, option("--high")] = False) -> None:
    SEEN.update(locals())


def gild(frame: GoldenFrame) -> None:
    SEEN.update(locals())


def run_grouped(*arguments: str) -> Result:
    SEEN.clear()
    shop = App("shop")
    shop.command()(hang)
    shop.command()(gild)
    return CliRunner().invoke(shop, arguments, catch_exceptions=False)


def test_a_dataclass_is_a_group_of_options() -> None:
    assert run_grouped("hang", "wall", "--nails", "3", "--high").exit_code == 0
    assert {"frame": Frame("wood", 3), "place": "wall", "high": True} == SEEN
    assert run_grouped("gild", "--carved").exit_code == 0
    assert {"frame": GoldenFrame("gold", None, True)} == SEEN
    assert "below 1" in run_grouped("hang", "wall", "--nails", "0").stderr


def test_the_help_of_a_group_has_its_own_heading() -> None:
    text = run_grouped("hang", "--help").stdout
    assert text.index("--high") < text.index("the frame:") < text.index("--material")
    assert "[default: gold]" in run_grouped("gild", "--help").stdout


def test_options_of_a_group_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIFOLIO_MATERIAL", "metal")
    run_grouped("hang", "wall")
    assert SEEN["frame"] == Frame("metal")
