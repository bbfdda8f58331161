"""`bifolio generate --speculative`: other guesses, the same text."""

from __future__ import annotations

import pytest

from bifolio.cli.main import build_app
from bifolio.errors import BifolioError
from cli_runner import CliRunner


def generate(*arguments: str) -> tuple[str, str]:
    result = CliRunner().invoke(build_app(), ["generate", "--threads", "1", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.mark.full
def test_the_text_is_the_same_and_the_guesses_are_counted() -> None:
    arguments = ("One day, a little dog", "-t", "0", "-n", "40")
    plain, _ = generate(*arguments)
    assert plain.strip()
    for method in (["--speculative", "draft"], ["--speculative", "ngram"], ["--draft-model", "stories-draft"]):
        text, log = generate(*arguments, *method, "--verbose")
        assert text == plain
        assert "guesses were right (" in log


@pytest.mark.full
def test_a_sampled_text_is_the_same_too() -> None:
    arguments = ("Lily and her brother", "--seed", "3", "-n", "40")
    assert generate(*arguments) == generate(*arguments, "--speculative", "draft")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speculative", "magic"], "'draft', 'ngram', 'eagle' or 'mtp'"),
        (["--speculative", "eagle"], "--draft-model PATH"),
        (["--speculative", "eagle", "--draft-model", "nowhere"], "is not a folder"),
        (["--speculative", "mtp"], "llama have no head"),
        (["--speculative", "ngram", "--draft-model", "stories-draft"], "leave one of them out"),
        (["--speculative", "draft", "--model", "shakespeare"], "shakespeare-draft"),
        (["--draft-model", "shakespeare"], "vocabulary|tokens"),
    ],
)
def test_what_cannot_work_together(arguments: list[str], message: str) -> None:
    with pytest.raises(BifolioError, match=message):
        generate("The", *arguments)
