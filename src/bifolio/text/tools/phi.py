"""`<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>` and `functools[...]`: Phi-4-mini."""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat
from bifolio.text.tools.granite import write_list
from bifolio.text.tools.readers import JsonCallsReader

OPENING, CLOSING, SPELLED = "<|tool_call|>", "<|/tool_call|>", "functools"


class PhiReader(JsonCallsReader):
    """A list of calls; the closing marker after it belongs to the block."""

    _is_closing = False

    def _step(self) -> bool:
        if not self._is_closing:
            went_on = super()._step()
            if self.is_broken or not self.is_over:
                return went_on
            self.is_over, self._is_closing = False, True
        self.buffer.peek()
        is_closed = self.buffer.starts(CLOSING)
        if is_closed:
            self.buffer.skip(len(CLOSING))
        self.is_over = is_closed is not None
        return False


class Phi(ToolFormat):
    name = "phi"
    markers = (OPENING, CLOSING)

    @classmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        return cls() if CLOSING in template or "functools" in template or "<|tool|>" in template else None

    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        return BlockParser(tools, PhiReader, openings=(OPENING, SPELLED), is_certain=is_certain)

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        write_list(lark, OPENING, CLOSING, tools, must_call=must_call, many=many)
