"""Text that arrives in pieces and is read from the front, so that each character is looked at a few times at most."""

from __future__ import annotations

import re

_SPACES = re.compile(r"\s*")
_STRING = '"..."'  # sought by `string_end`


class Marks:
    """Texts to look for, of which the first one in a text counts."""

    __slots__ = ("pattern", "texts")

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.pattern = re.compile("|".join(map(re.escape, texts)))

    def begun(self, text: str, start: int, stop: int) -> int:
        """Length of the longest end of `text[start:stop]` that begins a mark without completing it."""
        longest = 0
        for mark in self.texts:
            at = text.find(mark[0], max(start, stop - len(mark) + 1), stop)
            while at >= 0 and not mark.startswith(text[at:stop]):
                at = text.find(mark[0], at + 1, stop)
            if at >= 0:
                longest = max(longest, stop - at)
        return longest


class Buffer:
    """The text that was not read yet.

        |<-- read -->|<-- looked at, without the mark sought -->|<-- new -->|
                     at                                         _from

    All readers of answers scan text by these methods alone. A search continues where it stopped (`find`, `string_end`),
    or the text before its end is taken (`take_before`, `search`), so the work is linear in the text, however it is cut.
    """

    __slots__ = ("_from", "_sought", "at", "text")

    def __init__(self) -> None:
        self.text, self.at = "", 0
        self._sought, self._from = "", 0

    def append(self, text: str) -> None:
        at = self.at
        self._from -= at
        self.text, self.at = self.text[at:] + text if at < len(self.text) else text, 0

    def unread(self, text: str) -> None:
        """Put text back in front. Text that was taken since the last piece arrived is not copied."""
        start = self.at - len(text)
        if start >= 0 and self.text.startswith(text, start):
            self.at = start
        else:
            self.text, self.at = text + self.text[self.at :], 0
        self._sought = ""

    def __len__(self) -> int:
        return len(self.text) - self.at

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    def peek(self) -> str:
        """Skip spaces; the next character, which is empty if it has not come."""
        self.take_spaces()
        return self.text[self.at : self.at + 1]

    def starts(self, mark: str) -> bool | None:
        """Whether the text begins with a mark; None if it is not known yet."""
        begun = self.text[self.at : self.at + len(mark)]
        return True if begun == mark else None if mark.startswith(begun) else False

    def skip(self, count: int) -> None:
        if count:
            self.at += count
            self._sought = ""

    def take(self, count: int | None = None) -> str:
        start, length = self.at, len(self.text)
        end = length if count is None else min(start + count, length)
        if end > start:
            self.at, self._sought = end, ""
        return self.text[start:end]

    def take_spaces(self) -> str:
        found = _SPACES.match(self.text, self.at)
        return self.take(found.end() - self.at) if found is not None and found.end() > self.at else ""

    def take_before(self, marks: Marks, most: int | None = None) -> tuple[str, str]:
        """The text before the first mark in `most` characters, and the mark, both taken.

        Without a mark: the text that is no part of one, and "".
        """
        text, start = self.text, self.at
        stop = len(text) if most is None else min(len(text), start + most)
        found = self.search(marks.pattern, start, stop)
        if found is None:
            return self.take(stop - start - marks.begun(text, start, stop)), ""
        self.skip(found.end() - start)
        return text[start : found.start()], found.group()

    def search(self, pattern: re.Pattern[str], start: int, stop: int | None = None) -> re.Match[str] | None:
        """The first match between two positions of `text`. The caller reads on after it, or takes the text."""
        return pattern.search(self.text, start, len(self.text) if stop is None else stop)

    def find(self, mark: str, most: int) -> int:
        """The number of characters before a mark that lies in the next `most` ones, or -1."""
        start = max(self._from, self.at) if self._sought == mark else self.at
        stop = min(len(self.text), self.at + most)
        found = self._index(mark, start, stop)
        self._sought, self._from = ("", 0) if found >= 0 else (mark, stop - len(mark) + 1)
        return found - self.at if found >= 0 else -1

    def string_end(self, most: int) -> int:
        """The length of the JSON string at the front, if it ends in the next `most` characters, or -1."""
        start = self._from if self._sought == _STRING else self.at + 1
        stop = min(len(self.text), self.at + most)
        while (found := self._index('"', start, stop)) >= 0:
            before = found
            while self.text[before - 1] == "\\":
                before -= 1
            if (found - before) % 2 == 0:
                self._sought = ""
                return found + 1 - self.at
            start = found + 1
        self._sought, self._from = _STRING, max(stop, self.at + 1)
        return -1

    def _index(self, mark: str, start: int, stop: int) -> int:
        return self.text.find(mark, start, stop)
