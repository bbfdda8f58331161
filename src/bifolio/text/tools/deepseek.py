"""`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` in a block of all calls: DeepSeek V3 and R1.

V3 and R1 write `function<｜tool▁sep｜>NAME` and the arguments in a code block of Markdown; V3.1 writes both plainly.
"""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat
from bifolio.text.tools.marked_calls import MarkedCallReader, write_marked_calls

OPENING, CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, END_FENCE = "```json\n", "```"


class DeepSeekReader(MarkedCallReader):
    """A head is NAME, or `function`, NAME and the beginning of a code block."""

    BEGIN, END = BEGIN, END

    def _read_head(self) -> bool:
        if self._state == "head":
            kind = self._until(SEPARATOR)
            if kind is None:
                return False
            if kind.strip() != "function":
                return self._begin_value(kind.strip())
            self._state = "name"
        name = self._until(FENCE)
        return False if name is None else self._begin_value(name.strip())

    def _read_end(self) -> bool:
        """The end of the call, and that of the code block, which may stand before it."""
        if not self.buffer.peek():
            return False
        fence = self.buffer.starts(END_FENCE)
        if fence:
            self.buffer.skip(len(END_FENCE))
        if fence is not False:
            return bool(fence)
        return super()._read_end()


class DeepSeek(ToolFormat):
    name = "deepseek"
    markers = (OPENING, CLOSING, BEGIN, SEPARATOR, END)

    def __init__(self, has_fences: bool = False) -> None:
        self._has_fences = has_fences  # arguments stand in a code block

    @classmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        return cls("```json" in template) if OPENING in template else None

    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        return BlockParser(tools, DeepSeekReader, openings=(OPENING,), closing=CLOSING, is_certain=is_certain)

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        begin, separator, end = map(lark.marker, (BEGIN, SEPARATOR, END))
        calls = []
        for tool in tools:
            head = f"{lark.text(tool.name)} {separator}"
            tail = ""
            if self._has_fences:
                named = lark.text(f"{tool.name}\n{FENCE}")
                head = f'"function" {separator} {named}'
                tail = lark.text(f"\n{END_FENCE}")
            calls.append(f"{begin} {head} {lark.arguments(tool)} {tail} {end}")
        write_marked_calls(lark, OPENING, calls, CLOSING, must_call=must_call, many=many)
