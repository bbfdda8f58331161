"""`{"name": ..., "parameters": {...}}` as the whole answer: Llama 3.1 and later."""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat
from bifolio.text.tools.readers import JsonCallsReader

PYTHON_TAG = "<|python_tag|>"


class Llama3(ToolFormat):
    """Several calls are separated by semicolons; a tag may stand before them."""

    name = "llama3"
    markers = (PYTHON_TAG,)

    @classmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        return cls() if '"parameters":' in template and "<|start_header_id|>" in template else None

    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        return BlockParser(
            tools,
            lambda known: JsonCallsReader(known, separators=";,"),
            openings=(PYTHON_TAG,),
            at_start="{[",
            is_certain=is_certain,
        )

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        call = lark.calls([lark.json_call(tool, "parameters") for tool in tools])
        calls = f'{call} ("; " {call})*' if many else call
        if must_call:
            lark.rule("start", calls)
        else:
            lark.rule("start", f"{lark.marker(PYTHON_TAG)}? {calls} | OTHER?")
            lark.rule("OTHER", r"/[^{\[](.|\n)*/")
