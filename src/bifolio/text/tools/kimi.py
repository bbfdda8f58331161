"""`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` in one block: Kimi-K2."""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat, write_blocks
from bifolio.text.tools.readers import JsonValueReader, read_object

OPENING, CLOSING = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
PREFIX = "functions."


class KimiReader(JsonValueReader):
    """Reads calls one after the other."""

    _state = "begin"

    def _step(self) -> bool:
        if self._state == "begin":
            return self._expect(BEGIN) and self._enter("name", False)
        if self._state == "name":
            found = self._until(ARGUMENTS)
            if found is None:
                return False
            self._state = "value"
            return self._begin_call(found.strip().removeprefix(PREFIX).partition(":")[0])
        if self._state == "value":
            return self._read_value()
        return self._expect(END) and self._enter("begin", True)

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


class Kimi(ToolFormat):
    name = "kimi"
    markers = (OPENING, CLOSING, BEGIN, ARGUMENTS, END)

    @classmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        return cls() if OPENING in template else None

    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        return BlockParser(tools, KimiReader, openings=(OPENING,), closing=CLOSING, is_certain=is_certain)

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        begin, arguments, end = map(lark.marker, (BEGIN, ARGUMENTS, END))
        calls = []
        for tool in tools:
            head = lark.text(f"{PREFIX}{tool.name}:")
            calls.append(f"{begin} {head} /[0-9]{{1,4}}/ {arguments} {lark.arguments(tool)} {end}")
        call = lark.calls(calls)
        body = f"{call} (SPACE {call})*" if many else call
        write_blocks(lark, OPENING, body, CLOSING, must_call=must_call, many=many, repeats=False)
