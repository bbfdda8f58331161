"""Options from BIFOLIO_* variables and config.toml: their order, their types, and mistakes in them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest

from bifolio.cli import commands
from bifolio.errors import ConfigError
from cli_runner import CliRunner, Result


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BIFOLIO_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path / "config.toml"


def run(*arguments: str) -> tuple[dict[str, Any], Result]:
    seen: dict[str, Any] = {}
    app = commands.App("bifolio")

    @app.command("go", help="Go.")
    def go(
        name: Annotated[str | None, commands.argument()] = None,
        threads: Annotated[int | None, commands.option("--threads", min=1, help="Threads.")] = None,
        kv_dtype: Annotated[str, commands.option("--kv-dtype", "-k")] = "auto",
        stop: Annotated[list[str] | None, commands.option("--stop")] = None,
        quiet: Annotated[bool, commands.option("--quiet")] = False,
        echo: Annotated[bool | None, commands.option()] = None,
    ) -> None:
        seen.update(name=name, threads=threads, kv_dtype=kv_dtype, stop=stop, quiet=quiet, echo=echo)

    return seen, CliRunner().invoke(app, ["go", *arguments])


def test_the_command_line_comes_first_then_the_environment_then_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run()[0]["threads"] is None
    config.write_text("threads = 2\nunknown = 1\n")
    assert run()[0]["threads"] == 2
    config.write_text("threads = 2\n[go]\nthreads = 3\n")
    assert run()[0]["threads"] == 3
    monkeypatch.setenv("BIFOLIO_THREADS", "4")
    assert run()[0]["threads"] == 4
    assert run("--threads", "5")[0]["threads"] == 5
    assert "[default: 4]" in run("--help")[1].output


def test_values_of_every_type(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text('kv-dtype = "f16"\nstop = ["a", "b"]\nquiet = true\necho = false\nname = "no option"\n')
    seen, _ = run()
    assert seen == {"name": None, "threads": None, "kv_dtype": "f16", "stop": ["a", "b"], "quiet": True, "echo": False}
    monkeypatch.setenv("BIFOLIO_STOP", "x,y")
    monkeypatch.setenv("BIFOLIO_QUIET", "no")
    assert (run()[0]["stop"], run()[0]["quiet"]) == (["x", "y"], False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threads = 'many'", "threads in .* is 'many'"),
        ("threads = 0", "is below 1"),
        ("quiet = 7", "write true or false"),
        ("[go]\nthread = 1", "`bifolio go` has no option 'thread': did you mean 'threads'"),
        ("go = 1", "must be a table"),
        ("= broken", "cannot be read"),
    ],
)
def test_mistakes_name_their_place(config: Path, text: str, message: str) -> None:
    config.write_text(text + "\n")
    error = run()[1].exception
    assert isinstance(error, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise error


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        ("threds = 1", ["no verb has an option 'threds': did you mean 'threads'?"]),
        ("temprature = 0.5", ["no verb has an option 'temprature': did you mean 'temperature'?"]),
        ("[cht]\nmodel = 'x'", ["[cht] is no verb: did you mean 'chat'?"]),
        ("xyzzy = 1\n[go]\nthreads = 2", ["no verb has an option 'xyzzy'"]),
        ("temperature = 0.5\n[chat]\nmodel = 'x'\n['bench throughput']\nrepetitions = 3", []),  # of other verbs
    ],
)
def test_names_that_no_verb_has_are_warned_about(config: Path, text: str, warned: list[str]) -> None:
    config.write_text(text + "\n")
    _, result = run()
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [f"warning: {config}: {line}" for line in warned]


def test_a_bad_variable_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIFOLIO_THREADS", "x")
    assert "BIFOLIO_THREADS is 'x'" in str(run()[1].exception)


def test_variables_that_stand_for_no_option_are_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, note in (
        ("BIFOLIO_THREADSS", "stands for no option: did you mean 'BIFOLIO_THREADS'?"),
        ("BIFOLIO_JSON", "has no effect: pass --json"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(name, "4")
            assert f"warning: {name} {note}" in run()[1].stderr
    for name in ("BIFOLIO_THREADS", "BIFOLIO_PORT", "BIFOLIO_ISA", "BIFOLIO_TEST_DATA"):  # --port is of another verb
        with monkeypatch.context() as patch:
            patch.setenv(name, "4")
            assert run()[1].stderr == ""


def test_a_table_inside_the_table_of_a_verb_is_refused(config: Path) -> None:
    config.write_text("[go.there]\nthreads = 2\n")
    result = run()[1]
    assert 'write ["go there"] instead of [go.there]' in str(result.exception)
