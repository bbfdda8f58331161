"""`<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`: Granite 3."""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat, write_blocks
from bifolio.text.tools.readers import JsonCallsReader

OPENING, SPELLED = "<|tool_call|>", "<tool_call>"


class Granite(ToolFormat):
    name = "granite"
    markers = (OPENING, SPELLED)

    @classmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        is_granite = "<|start_of_role|>" in template and OPENING in template
        return cls() if is_granite else None

    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        return BlockParser(tools, JsonCallsReader, openings=(OPENING, SPELLED), is_certain=is_certain)

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        write_list(lark, OPENING, None, tools, must_call=must_call, many=many)


def write_list(
    lark: LarkWriter, opening: str, closing: str | None, tools: Sequence[ToolSpec], *, must_call: bool, many: bool
) -> None:
    """Write `start` for one block with a JSON list of calls."""
    call = lark.calls([lark.json_call(tool) for tool in tools])
    calls = f'"[" {call} (", " {call})* "]"' if many else f'"[" {call} "]"'
    write_blocks(lark, opening, calls, closing, must_call=must_call, many=many, repeats=False)
