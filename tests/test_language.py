"""Prose avoids the words and clauses that `plain_language` lists."""

from __future__ import annotations

import pytest

from plain_language import all_hits, hits_in


def test_prose_is_plain() -> None:
    lines = [f"{hit.path}:{hit.line}: {hit.words!r}: {hit.instead}" for hit in all_hits()]
    assert not lines, "\n".join(["rewrite in plain words:", *lines])


@pytest.mark.parametrize(
    ("source", "suffix"),
    [
        ("# nobody reads it\n", ".py"),
        ('"""What a step does."""\n', ".py"),
        ('x = f"{name}: what it holds"\n', ".py"),
        ("# tokens that\n# everyone's cache holds\n", ".py"),
        ("int x;  // what lies behind\n", ".cpp"),
        ('throw Error("somebody called it");', ".cpp"),
        ("/* gives up\n what it hoards */", ".js"),
        ("A key that is let in.", ".md"),
        ("The rest is said the same way: both say the same.", ".md"),
        ("It refuses what\nthe cache cannot hold.", ".md"),
    ],
)
def test_banned_words_are_found(source: str, suffix: str) -> None:
    assert list(hits_in(source, suffix))


@pytest.mark.parametrize(
    ("source", "suffix"),
    [
        ("what = nobody\nif what is nobody:\n    pass\n", ".py"),  # names in code
        ("report(what, isa);", ".cpp"),
        ('f"{what} is truncated"\n', ".py"),
        ('"""Errors say what to do."""\n', ".py"),
        ("What is a block? A page of the cache.", ".md"),
        ('echo "What is the capital of France?"', ""),
        ("Call `what it does`.", ".md"),
        ("<!-- language: off -->\neverybody\n<!-- language: on -->", ".md"),
        ("A bookshelf, undared.", ".md"),
    ],
)
def test_code_questions_and_quotations_are_not(source: str, suffix: str) -> None:
    assert not list(hits_in(source, suffix))


def test_lines_are_those_of_the_file() -> None:
    source = '"""Fine.\n\nWhat follows is not."""\n\n\n# fine,\n# but nobody knows\n'
    assert [line for line, _, _ in hits_in(source, ".py")] == [3, 7]
    assert [line for line, _, _ in hits_in("a();\n// fine,\n// nobody\n", ".cpp")] == [3]
    assert [line for line, _, _ in hits_in("<!-- language: off -->\n\n<!-- language: on -->\nnobody", ".md")] == [4]
