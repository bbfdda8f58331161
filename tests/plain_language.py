"""Words and clauses that prose in this repository avoids.

    python tests/plain_language.py    # every occurrence: file, line, words, advice

Prose is all of a Markdown, HTML or JSON file or a shell script, and the comments and strings of Python, C++, JavaScript
and CSS files. Code between backticks and values in f-strings are no prose. Quoted output of a model stands between
`<!-- language: off -->` and `<!-- language: on -->`.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("src", "native", "docs", "benchmarks", "scripts", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PYTHON, CODE, TEXT = {".py"}, {".h", ".cpp", ".js", ".css"}, {".md", ".html", ".json", ""}

PERSON = "name the component that acts: the planner, the engine, a client"
FIELD = "use the established term of the field"
RULES: tuple[tuple[str, str], ...] = (
    (r"nobody|somebody|everybody|anybody|everyone|someone|anyone|no one|whoever|whomever", PERSON),
    (r"(?:says?|said|tells?|told)(?: \w+)? the same", "state which values are equal"),
    (r"blocks (?:lack|are lacking)", "say that no block is free"),
    (r"the books", "counters, statistics or records"),
    (r"hoards?|hoarded|hoarding", "cached memory; releases cached memory"),
    (r"in company", "batched with other requests"),
    (r"(?:is|are|was|were|be|being) let in", "accepted"),
    (r"crumbs?", FIELD),
    (r"dared|dares?", FIELD),
    (r"what(?=\s+(?!to\b)\w)", "name the thing instead of a clause with 'what'"),
)
WITHOUT_CONTEXT = "|".join(pattern for pattern, _ in RULES).replace(r"(?=\s+(?!to\b)\w)", "")
ANYWHERE = re.compile(rf"\b(?:{WITHOUT_CONTEXT})")  # in lower case; much faster than finding the prose of a source
BANNED = [(re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE), instead) for pattern, instead in RULES]
SENTENCE_END = re.compile(r"[.?!](?=[\s\"')\]]|$)|\n\s*\n")
SILENCED = re.compile(r"<!-- language: off -->.*?<!-- language: on -->", re.DOTALL)
NOT_PROSE = re.compile(r"``.*?``|`[^`\n]*`|\{[^{}\n]*\}")
COMMENT = r"//[^\n]*|/\*.*?\*/"
STRING = r"\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`"
CODE_PROSE = re.compile(f"({COMMENT})|({STRING})", re.DOTALL)


class Hit(NamedTuple):
    path: str  # relative to the root
    line: int
    words: str
    instead: str


def files() -> Iterator[Path]:
    for place in PLACES:
        path = ROOT / place
        candidates = [path] if path.is_file() else sorted(path.rglob("*"))
        for candidate in candidates:
            known = candidate.suffix in PYTHON | CODE | TEXT
            if candidate.is_file() and known and "__pycache__" not in candidate.parts:
                yield candidate


def hits_of(path: Path) -> list[Hit]:
    name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    return [Hit(name, *found) for found in hits_in(source, path.suffix)]


def hits_in(source: str, suffix: str) -> Iterator[tuple[int, str, str]]:
    """(line, words, advice) of every banned word or clause in the prose of a source."""
    if not ANYWHERE.search(source.lower()):
        return
    for first_line, text in prose(source, suffix):
        blanked = _blank(NOT_PROSE, text)
        for pattern, instead in BANNED:
            for match in pattern.finditer(blanked):
                if match.group().lower() == "what" and _is_question(blanked, match.end()):
                    continue
                words = " ".join(blanked[match.start() : match.end() + 20].split())
                yield first_line + blanked.count("\n", 0, match.start()), words, instead


def prose(source: str, suffix: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the parts that people read; line breaks are kept, so that lines can be counted."""
    if suffix in PYTHON:
        yield from _python_prose(source)
    elif suffix in CODE:
        yield from _code_prose(source)
    else:
        yield 1, _blank(SILENCED, source)


def _python_prose(source: str) -> Iterator[tuple[int, str]]:
    strings = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    comments: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line, text = token.start[0], token.string
        if token.type == tokenize.COMMENT:
            if comments and comments[-1][0] != line - 1:
                yield _joined(comments)
                comments = []
            comments.append((line, text.lstrip("#")))
        elif token.type in strings:
            yield line, text
    if comments:
        yield _joined(comments)


def _code_prose(source: str) -> Iterator[tuple[int, str]]:
    comments: list[tuple[int, str]] = []
    for match in CODE_PROSE.finditer(source):
        line = source.count("\n", 0, match.start()) + 1
        comment, string = match.groups()
        if comment is None:
            yield line, string
            continue
        if comments and comments[-1][0] != line - 1:
            yield _joined(comments)
            comments = []
        comments.append((line, comment.lstrip("/*")))
        if "\n" in comment:
            yield _joined(comments)
            comments = []
    if comments:
        yield _joined(comments)


def _joined(comments: list[tuple[int, str]]) -> tuple[int, str]:
    return comments[0][0], "\n".join(text for _, text in comments)


def _blank(pattern: re.Pattern[str], text: str) -> str:
    """The text without the matches; its line breaks stay, and a mark of no meaning keeps words apart."""
    return pattern.sub(lambda match: "·" + "\n" * match.group().count("\n"), text)


def _is_question(text: str, position: int) -> bool:
    end = SENTENCE_END.search(text, position)
    return end is not None and end.group() == "?"


def all_hits() -> list[Hit]:
    return [hit for path in files() for hit in hits_of(path)]


if __name__ == "__main__":
    for hit in all_hits():
        print(f"{hit.path}:{hit.line}: {hit.words}: {hit.instead}")
