"""JSON that every client can read: the one writer of values, and the one filter of JSON that a model writes.

Python reads and writes more than JSON has, and strict clients refuse the rest. Both replace it:

    NaN, Infinity, -Infinity, numbers beyond float64 (1e999)   null, as JavaScript writes them
    half of a surrogate pair, escaped or not                   U+FFFD, as UTF-8 decoders write bytes that are no text
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_SURROGATES = re.compile("[\ud800-\udfff]+")
_STRING_MARK = re.compile(r'["\\]')
_WORD = re.compile(r'[^\s,:{}\[\]"]*')  # a number or a constant
_WORD_OR_QUOTE = re.compile(r"[^\s,:{}\[\]]")
_FLOAT = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+\-]?\d+)?")
_CONSTANTS = ("NaN", "Infinity", "-Infinity")
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_LOW_BEGINS = re.compile(r"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?")  # less than a whole one
_ESCAPE_CHARS = 6  # `\ud800`
_REPLACED = r"\ufffd"


def write_json(value: Any, *, indent: int | None = None) -> str:
    """A value as strict JSON; characters are not escaped."""
    encoder = _ENCODER if indent is None else json.JSONEncoder(ensure_ascii=False, allow_nan=False, indent=indent)
    try:
        text = encoder.encode(value)
    except ValueError:
        text = encoder.encode(_finite(value))
    return _SURROGATES.sub(_characters, text)


def _characters(found: re.Match[str]) -> str:
    """Pairs of surrogates are characters."""
    return found.group().encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_finite(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def strict_text(text: str) -> str:
    """The text of a whole JSON value as strict JSON."""
    strict = StrictJsonText()
    return strict.push(text) + strict.finish()


class StrictJsonText:
    """Makes JSON text strict as it arrives. Numbers and escapes are returned when they are complete."""

    __slots__ = ("_held", "_in_string", "_word")

    def __init__(self) -> None:
        self._in_string = False
        self._held = ""  # the beginning of an escape, or of a pair of them
        self._word: list[str] = []  # the pieces of a number or constant

    def push(self, text: str) -> str:
        text, self._held = self._held + text, ""
        found: list[str] = []
        at = 0
        while at < len(text):
            at = self._read_string(text, at, found) if self._in_string else self._read_outside(text, at, found)
        return "".join(found)

    def finish(self) -> str:
        """The rest of text that ends here, which is cut JSON unless it is empty."""
        held, self._held = self._held, ""
        return self._end_word() + (_REPLACED + held[_ESCAPE_CHARS:] if _HIGH.match(held) else held)

    def _read_outside(self, text: str, at: int, found: list[str]) -> int:
        start = at
        if not self._word:
            first = _WORD_OR_QUOTE.search(text, at)
            at = len(text) if first is None else first.start()
            found.append(text[start:at])
            if first is None:
                return at
            if first.group() == '"':
                self._in_string = True
                found.append('"')
                return at + 1
        word = _WORD.match(text, at)
        end = at if word is None else word.end()
        self._word.append(text[at:end])
        if end < len(text):
            found.append(self._end_word())
        return end

    def _end_word(self) -> str:
        word, self._word = "".join(self._word), []
        is_float = _FLOAT.fullmatch(word) and not word.lstrip("-").isdigit()
        return "null" if word in _CONSTANTS or (is_float and math.isinf(float(word))) else word

    def _read_string(self, text: str, at: int, found: list[str]) -> int:
        mark = _STRING_MARK.search(text, at)
        end = len(text) if mark is None else mark.start()
        found.append(text[at:end])
        if mark is None:
            return end
        if mark.group() == '"':
            self._in_string = False
            found.append('"')
            return end + 1
        size = self._escape_size(text, end)
        if size is None:
            self._held = text[end:]
            return len(text)
        escape = text[end : end + size]
        is_half = size == _ESCAPE_CHARS and (_HIGH.match(escape) or _LOW.match(escape))
        found.append(_REPLACED if is_half else escape)
        return end + size

    @staticmethod
    def _escape_size(text: str, at: int) -> int | None:
        """Characters of the escape, or of the pair of them that is one character; None if it is not complete."""
        size = _ESCAPE_CHARS if text[at + 1 : at + 2] == "u" else 2
        if len(text) < at + size:
            return None
        if not _HIGH.match(text, at):
            return size
        if _LOW.match(text, at + size):
            return 2 * size
        return None if _LOW_BEGINS.fullmatch(text, at + size) else size
