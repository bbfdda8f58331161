"""The code blocks of README.md and docs/: where they stand, their language, and how they are to be run.

A comment before a block says how it is run where that is not simply "as it stands":

    <!-- run: full -->                               takes more than half a second: not in the quick tier
    <!-- run: needs-gpu -->                          without a GPU every command ends with one sentence that says so
    <!-- run: add "--steps 2" to "bifolio train" --> options that make the commands with this beginning short
    <!-- run: beside "bifolio serve" -->             a server runs meanwhile
    <!-- run: installed -->                          the package is installed: `pip install` is checked, the rest is run
    <!-- run: help: REASON -->                       not run; the program exists, and its --help has every option used
    <!-- run: walk: REASON -->                       run by scripts/walk-docs; tests check the options alone
    <!-- run: no: REASON -->                         neither run nor checked

Several are separated by semicolons. A block without a language must begin with a known command; all other blocks that
are no code are labelled `text`, `json` and so on.

    <!-- output -->                                  this block is the output of the code before it; `...` is any text
    <!-- output: real model -->                      the same, unless a small model is in the place of the named one
    <!-- session: bifolio chat -m smollm2 -->        a conversation: lines with "> " are typed, the others are answers
    <!-- walk: in order -->                          blocks that build on each other: one folder, one interpreter
                                                     for its Python blocks, and servers that run until the page ends
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELL, PYTHON = {"sh", "bash", "shell", "console"}, {"python", "py"}
NO_CODE = {
    "text",
    "json",
    "jsonl",
    "toml",
    "yaml",
    "ini",
    "html",
    "csv",
    "diff",
    "mermaid",
    "cpp",
    "c",
    "cmake",
    "jinja",
}
KNOWN_COMMANDS = {"bifolio", "python", "python3", "pip", "pytest", "torchrun", "echo", "curl", "cat", "export", "cd"}
FENCE = re.compile(r"(?P<indent> {0,3})(?P<fence>`{3,}|~{3,})\s*(?P<language>[\w+-]*).*")
MARKER = re.compile(r"\s*<!--\s*run:\s*(?P<items>.*?)\s*-->\s*")
ADD = re.compile(r'add "(?P<options>[^"]+)" to "(?P<command>[^"]+)"')
BESIDE = re.compile(r'beside "(?P<command>[^"]+)"')
OUTPUT = re.compile(r"\s*<!--\s*output(?P<real>: real model)?\s*-->\s*")
SESSION = re.compile(r"\s*<!--\s*session:\s*(?P<command>.*?)\s*-->\s*")
WALK = re.compile(r"^<!-- walk: in order -->$", re.MULTILINE)
REASON = re.compile(r"(?P<kind>help|walk|no): *(?P<reason>\S.*)")


class MarkerError(ValueError):
    """A marker that is not one of those above."""


@dataclass(frozen=True)
class Marker:
    full: bool = False
    needs_gpu: bool = False
    installed: bool = False
    added: tuple[tuple[str, str], ...] = ()  # (beginning of a command, options)
    beside: str | None = None
    help_only: str | None = None  # the reason
    walk_only: str | None = None  # the reason
    never: str | None = None  # the reason

    @classmethod
    def parse(cls, items: str) -> Marker:
        values: dict[str, object] = {}
        added: list[tuple[str, str]] = []
        for item in (part.strip() for part in items.split(";")):
            if item in ("full", "needs-gpu", "installed"):
                values[item.replace("-", "_")] = True
            elif match := ADD.fullmatch(item):
                added.append((match["command"], match["options"]))
            elif match := BESIDE.fullmatch(item):
                values["beside"] = match["command"]
            elif match := REASON.fullmatch(item):
                values[{"help": "help_only", "walk": "walk_only", "no": "never"}[match["kind"]]] = match["reason"]
            else:
                raise MarkerError(f"{item!r} is no way to run a block: see tests/docs/doc_blocks.py")
        return cls(added=tuple(added), **values)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Shown:
    """The output that a page shows for a block."""

    text: str
    of_real_model: bool = False  # a small model in its place answers something else

    def matches(self, output: str) -> bool:
        """Whether the output is the shown one: `...` is any text, and spaces at the ends of lines do not count."""
        parts = [re.escape(part) for part in _stripped(self.text).split("...")]
        return re.fullmatch(".*".join(parts), _stripped(output), re.DOTALL) is not None


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@dataclass(frozen=True)
class Block:
    path: str  # relative to the root
    line: int  # of its first line of code
    language: str
    text: str
    marker: Marker = field(default_factory=Marker)
    shown: Shown | None = None  # the output that the page has after it
    session: str | None = None  # the command of a conversation

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}"

    @property
    def kind(self) -> str:
        """shell, python, session, none (labelled as no code) or unknown."""
        if self.session is not None:
            return "session"
        if self.language in SHELL:
            return "shell"
        if self.language in PYTHON:
            return "python"
        if self.language in NO_CODE:
            return "none"
        return "shell" if not self.language and begins_with_command(self.text) else "unknown"

    @property
    def is_quick(self) -> bool:
        """Whether the quick tier runs it: short commands; Python blocks and `--help` of scripts load many modules."""
        is_checked = self.marker.help_only is not None or self.marker.walk_only is not None
        return not self.marker.full and self.kind == "shell" and not is_checked


def begins_with_command(text: str) -> bool:
    words = text.split()
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    return bool(words) and (words[0] in KNOWN_COMMANDS or words[0].startswith(("scripts/", "./")))


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def all_blocks() -> list[Block]:
    """The blocks of all pages that are not walked as a whole."""
    pages = [(path, path.read_text("utf-8")) for path in documents()]
    return [block for path, text in pages if not WALK.search(text) for block in blocks_of(text, _relative(path))]


def walked_pages() -> dict[str, list[Block]]:
    """The blocks of pages that are run in order, by page."""
    pages = {_relative(path): path.read_text("utf-8") for path in documents()}
    return {name: list(blocks_of(text, name)) for name, text in pages.items() if WALK.search(text)}


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks_of(markdown: str, path: str) -> Iterator[Block]:
    """Fenced blocks, and indented ones that begin with a known command; shown output belongs to the code before it."""
    last: Block | None = None
    for block in _plain_blocks(markdown.splitlines(), path):
        if block.shown is None:
            if last is not None:
                yield last
            last = block
        elif last is None or last.kind not in ("shell", "python"):
            raise MarkerError(f"{block.name}: no code stands before this output")
        else:
            last = replace(last, shown=block.shown)
    if last is not None:
        yield last


def _plain_blocks(lines: list[str], path: str) -> Iterator[Block]:
    """The blocks one by one: a block of output has itself as `shown`."""
    number, marker, is_list = 0, Marker(), False
    output: re.Match[str] | None = None
    session: str | None = None
    while number < len(lines):
        line = lines[number]
        if match := MARKER.fullmatch(line):
            marker = Marker.parse(match["items"])
            number += 1
        elif match := OUTPUT.fullmatch(line):
            output = match
            number += 1
        elif match := SESSION.fullmatch(line):
            session = match["command"]
            number += 1
        elif match := FENCE.fullmatch(line):
            end = _end_of_fence(lines, number + 1, match["fence"])
            body = [text.removeprefix(match["indent"]) for text in lines[number + 1 : end]]
            text = "\n".join(body)
            shown = Shown(text, output["real"] is not None) if output is not None else None
            yield Block(path, number + 2, match["language"].lower(), text, marker, shown, session)
            number, marker, is_list, output, session = end + 1, Marker(), False, None, None
        elif line.startswith("    ") and not is_list and begins_with_command(line):
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            body = [text.removeprefix("    ") for text in lines[number:end]]
            yield Block(path, number + 1, "", "\n".join(body).rstrip(), marker)
            number, marker = end, Marker()
        else:
            if line.strip():
                marker = Marker()
                is_list = bool(re.match(r"\s*([-*+]|\d+\.) ", line)) or (is_list and line.startswith(" "))
            number += 1


def _end_of_fence(lines: list[str], start: int, fence: str) -> int:
    closing = re.compile(rf" {{0,3}}{re.escape(fence[0])}{{{len(fence)},}}\s*")
    return next((number for number in range(start, len(lines)) if closing.fullmatch(lines[number])), len(lines))


def commands_of(block: Block) -> list[str]:
    """The commands of a shell block, continued lines joined; `cd` and `export` lines stand before all later ones."""
    text = block.text
    if block.language == "console":
        text = "\n".join(line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ "))
    state: list[str] = []
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        command = without_comment(line)
        if not command:
            continue
        if re.match(r"(cd|export|source|\.|unset)\s", command):
            state.append(command)
        else:
            found.append("\n".join([*state, command]))
    return found


def without_comment(line: str) -> str:
    """The code of a line: everything before a # that begins a word outside quotes."""
    quote = ""
    for place, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place].strip()
    return line.strip()
