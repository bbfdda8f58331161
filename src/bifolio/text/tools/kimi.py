"""`<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>` in one block: Kimi-K2."""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat
from bifolio.text.tools.marked_calls import MarkedCallReader, write_marked_calls

OPENING, CLOSING = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, ARGUMENTS, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
PREFIX = "functions."


class KimiReader(MarkedCallReader):
    """A head is `functions.NAME:NUMBER`."""

    BEGIN, END = BEGIN, END

    def _read_head(self) -> bool:
        found = self._until(ARGUMENTS)
        return False if found is None else self._begin_value(found.strip().removeprefix(PREFIX).partition(":")[0])


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
        write_marked_calls(lark, OPENING, calls, CLOSING, must_call=must_call, many=many)
