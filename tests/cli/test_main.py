"""The command itself: one verb is loaded when it is asked for, all for help; `python -m bifolio` is the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bifolio import __version__
from bifolio.cli.main import VERBS, wanted_verbs


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
