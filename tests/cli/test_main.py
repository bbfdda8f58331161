"""The command itself: one verb is loaded when it is asked for, all for help; `python -m bifolio` is the same."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from bifolio import __version__
from bifolio.cli.main import ALIASES, HEADINGS, VERBS, build_app, wanted_verbs
from cli_runner import CliRunner


def command(*arguments: str, check: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python -m bifolio`; `check` is code that runs in the same process afterwards."""
    run = [sys.executable, "-m", "bifolio", *arguments]
    if check:
        code = f"import sys; sys.argv = {['bifolio', *arguments]!r}\nfrom bifolio.cli.main import main\n"
        run = [sys.executable, "-c", code + "try:\n    main()\nexcept SystemExit:\n    pass\n" + check]
    return subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)


def test_only_the_wanted_verb_is_loaded() -> None:
    assert wanted_verbs(["generate", "hello"]) == ["generate"]
    for arguments in ([], ["--help"], ["--version"], ["unknown"], ["-h", "generate"]):
        assert wanted_verbs(arguments) == VERBS


def test_the_help_groups_the_verbs_and_shows_each_once() -> None:
    text = CliRunner().invoke(build_app(), ["--help"]).stdout
    places = [text.index(f"\n{heading}:\n") for heading in HEADINGS]
    assert places == sorted(places)
    assert list(HEADINGS) == ["use", "models", "measure", "operate"]
    shown = [line.split()[0] for line in text.splitlines() if line.startswith("  ") and line[2:3].isalpha()]
    assert sorted(shown) == sorted(VERBS)


def test_another_name_of_a_verb_works_and_is_listed_with_it() -> None:
    app = build_app()
    assert app.aliases == ALIASES == {"list": "models"}
    assert wanted_verbs(["list"]) == ["models"]
    run = CliRunner().invoke
    assert run(app, ["list", "--json"]).stdout == run(app, ["models", "--json"]).stdout != ""
    assert "(also: list)" in run(app, ["--help"]).stdout


@pytest.mark.parametrize(
    ("verb", "common", "advanced"),
    [
        ("serve", "--port", "--kv-events-topic"),
        ("generate", "--temperature", "--chunk-size"),
        ("train", "--steps", "--beta1"),
    ],
)
def test_help_is_short_and_help_all_is_complete(verb: str, common: str, advanced: str) -> None:
    app = build_app([verb])
    short, complete = (CliRunner().invoke(app, [verb, flag]).stdout for flag in ("--help", "--help-all"))
    assert re.search(rf" {common}[ ,]", short)  # "--name, -n" or "--name NAME, -n NAME", by the version of Python
    assert "--help-all" in short
    assert advanced not in short
    assert re.search(rf" {common}[ ,]", complete)
    assert re.search(rf" {advanced}[ ,]", complete)
    assert len(short.splitlines()) < 0.85 * len(complete.splitlines())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--temprature", "0"], "there is no option --temprature: did you mean '--temperature'?"),
        (
            ["generate", "Once", "--max-modellen=5"],
            "there is no option --max-modellen: did you mean '--max-model-len'?",
        ),
        (["quantize", "--fromat", "q8_0"], "there is no option --fromat: did you mean '--format'?"),
        (["generate", "--xyzzy"], "there is no option --xyzzy: see --help-all"),
        (["serve", "--port", "99999"], "--port/-p: 99999 is above 65535"),
        (["serve", "--port", "-1"], "--port/-p: -1 is below 0"),
    ],
)
def test_wrong_options_are_refused_by_name_before_any_work(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(build_app(arguments[:1]), arguments)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.full
def test_the_package_can_be_run() -> None:
    result = command("--version")
    assert (result.returncode, result.stdout) == (0, f"bifolio {__version__}\n")
    everything = command("--help").stdout
    for verb in VERBS:
        assert verb in everything


@pytest.mark.full
def test_an_unknown_verb_is_refused() -> None:
    result = command("sing")
    assert result.returncode == 2
    assert "sing" in result.stderr


@pytest.mark.full
@pytest.mark.parametrize("verb", ["generate", "models"])
def test_a_verb_does_not_load_what_others_need(verb: str) -> None:
    heavy = ("torch", "gguf", "matplotlib", "starlette", "transformers", "huggingface_hub", "rich.console")
    result = command(verb, "--help", check=f"print([name for name in {heavy} if name in sys.modules])")
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr


@pytest.mark.full
def test_generating_imports_no_more_than_it_needs() -> None:
    heavy = ("torch", "gguf", "matplotlib", "starlette", "jinja2", "huggingface_hub", "rich.console")
    result = command(
        "generate", "Once", "-n", "1", "-t", "0", "--max-model-len", "64",
        check=f"print()\nprint([name for name in {heavy} if name in sys.modules])",
    )  # fmt: skip
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr
