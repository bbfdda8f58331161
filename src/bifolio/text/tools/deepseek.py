"""`<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>` in a block of all calls: DeepSeek V3 and R1.

V3 and R1 write `function<｜tool▁sep｜>NAME` and the arguments in a code block of Markdown; V3.1 writes both plainly.
"""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat, write_blocks
from bifolio.text.tools.readers import JsonValueReader, read_object

OPENING, CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, END_FENCE = "```json\n", "```"


class DeepSeekReader(JsonValueReader):
    """Reads calls one after the other."""

    _state = "begin"

    def _step(self) -> bool:
        if self._state == "begin":
            return self._expect(BEGIN) and self._enter("kind", False)
        if self._state == "kind":
            kind = self._until(SEPARATOR)
            if kind is None:
                return False
            self._state = "name" if kind.strip() == "function" else "value"
            return True if self._state == "name" else self._begin_call(kind.strip())
        if self._state == "name":
            name = self._until(FENCE)
            if name is None:
                return False
            self._state = "value"
            return self._begin_call(name.strip())
        if self._state == "value":
            return self._read_value()
        return self._read_end()

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

    def _read_end(self) -> bool:
        """The end of the call, and that of the code block, which may stand before it."""
        if not self.buffer.peek():
            return False
        fence = self.buffer.starts(END_FENCE)
        if fence:
            self.buffer.skip(len(END_FENCE))
        if fence is not False:
            return bool(fence)
        return self._expect(END) and self._enter("begin", True)


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
        call = lark.calls(calls)
        body = f"{call} (SPACE {call})*" if many else call
        write_blocks(lark, OPENING, body, CLOSING, must_call=must_call, many=many, repeats=False)
