"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, Granite 4, SmolLM3.

Qwen2.5-Coder has the same template, but writes most calls into a ```json block or as the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat, write_blocks
from bifolio.text.tools.readers import JsonCallsReader
from bifolio.text.tools.unmarked import FencedCallsReader, PlainCallsReader

OPENING, CLOSING = "<tool_call>", "</tool_call>"
UNMARKED = {"```json": FencedCallsReader, "": PlainCallsReader}


class Hermes(ToolFormat):
    name = "hermes"
    markers = (OPENING, CLOSING)

    @classmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        return cls() if OPENING in template else None

    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        if is_certain:
            return BlockParser(tools, JsonCallsReader, openings=(OPENING,), closing=CLOSING, is_certain=True)
        return BlockParser(
            tools, JsonCallsReader, openings=(OPENING,), closing=CLOSING, at_start="{[", unmarked=UNMARKED
        )

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        call = lark.calls([lark.json_call(tool) for tool in tools])
        write_blocks(lark, OPENING, f"SPACE {call} SPACE", CLOSING, must_call=must_call, many=many)
