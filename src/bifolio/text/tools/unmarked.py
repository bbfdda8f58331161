"""Readers of calls that a model writes as plain JSON, without the markers that its template shows.

An answer about JSON looks alike, so these readers are strict: every object names an offered tool, has an object of
arguments, and holds nothing else.
"""

from __future__ import annotations

from bifolio.text.tools.events import Tools
from bifolio.text.tools.readers import JsonCallsReader, Place

FENCE = "```"


class PlainCallsReader(JsonCallsReader):
    """Reads `{"name": ..., "arguments": {...}}`: one object, several after each other, or a list of them."""

    def _read_opening(self, mark: str) -> bool:
        if self._key not in ("name", "arguments") or (self._key == "arguments" and mark != "{"):
            return self._fail()
        return super()._read_opening(mark)

    def _end_object(self) -> bool:
        return self._fail() if self._arguments is None else super()._end_object()

    def _read_after(self, mark: str) -> bool:
        if mark == "{" and not self._in_list:
            self._place = Place.ITEM
            return True
        return super()._read_after(mark)


class FencedCallsReader(PlainCallsReader):
    """Reads the same up to the fence that closes a block of code. A fence inside a string of JSON is text."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._is_list_over = False

    def _read_after(self, mark: str) -> bool:
        if self._in_list and mark == "]":
            self.buffer.skip(1)
            self._in_list, self._is_list_over, self.is_complete = False, True, True
            return True
        if mark == "`" and not self._in_list:
            self.is_over = self._expect(FENCE)
            return False
        if self._is_list_over or mark not in "{,":
            return self._fail()
        return super()._read_after(mark)
