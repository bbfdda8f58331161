"""Calls between marks, whose head names the function and whose arguments are one JSON object: DeepSeek, Kimi."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from bifolio.text.tools.format import LarkWriter, write_blocks
from bifolio.text.tools.readers import JsonValueReader, read_object


class MarkedCallReader(JsonValueReader):
    """Reads calls one after the other: |<- BEGIN ->|<- head ->|<- arguments ->|<- END ->|."""

    BEGIN: ClassVar[str]
    END: ClassVar[str]
    _state = "begin"

    def _step(self) -> bool:
        if self._state == "begin":
            return self._expect(self.BEGIN) and self._enter("head", False)
        if self._state == "value":
            return self._read_value()
        return self._read_end() if self._state == "end" else self._read_head()

    @abstractmethod
    def _read_head(self) -> bool:
        """Read the head up to the arguments, and begin the call."""

    def _read_end(self) -> bool:
        return self._expect(self.END) and self._enter("begin", True)

    def _begin_value(self, name: str) -> bool:
        """Begin a call of this function; its arguments follow."""
        self._state = "value"
        return self._begin_call(name)

    def _enter(self, state: str, is_complete: bool) -> bool:
        self._state, self.is_complete = state, is_complete
        return True

    def _read_value(self) -> bool:
        if self._scanner is None and self.buffer.peek() != "{":
            return self._fail() if self.buffer.peek() else False
        raw = self._value(sends=True)
        if raw is None:
            return False
        self._state = "end"
        return read_object(raw) is not None or self._fail()


def write_marked_calls(
    lark: LarkWriter, opening: str, calls: list[str], closing: str, *, must_call: bool, many: bool
) -> None:
    """The rules of a block of these calls."""
    call = lark.calls(calls)
    body = f"{call} (SPACE {call})*" if many else call
    write_blocks(lark, opening, body, closing, must_call=must_call, many=many, repeats=False)
