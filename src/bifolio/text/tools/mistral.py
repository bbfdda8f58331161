"""`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]NAME[ARGS]{...}` of later models: Mistral."""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.events import AnswerReader, Part, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat, write_blocks
from bifolio.text.tools.granite import write_list
from bifolio.text.tools.readers import JsonCallsReader, JsonValueReader, Reader, read_object

OPENING, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class NamedArgumentsReader(JsonValueReader):
    """Reads `NAME[ARGS]{...}` or `NAME[CALL_ID]ID[ARGS]{...}`."""

    _in_value = False

    def _step(self) -> bool:
        if not self._in_value:
            head = self._until(ARGS)
            if head is None:
                return False
            self._in_value = True
            return self._begin_call(head.partition(CALL_ID)[0].strip())
        if self._scanner is None and self.buffer.peek() != "{":
            return self._fail() if self.buffer.peek() else False
        raw = self._value(sends=True)
        if raw is None:
            return False
        if read_object(raw) is None:
            return self._fail()
        self.is_complete = self.is_over = True
        return False


class MistralReader(Reader):
    """The first character decides which of the two forms follows."""

    _inner: Reader | None = None

    def _step(self) -> bool:
        if self._inner is None:
            mark = self.buffer.peek()
            if not mark:
                return False
            self._inner = JsonCallsReader(self.tools) if mark in "[{" else NamedArgumentsReader(self.tools)
        inner = self._inner
        self.events += inner.feed(self.buffer.take())
        if inner.is_over or inner.is_broken:
            self.buffer.unread(inner.buffer.rest)
        self.is_broken, self.is_complete, self.is_over = inner.is_broken, inner.is_complete, inner.is_over
        return False

    def close(self) -> list[Part]:
        return [] if self._inner is None else self._inner.close()


class Mistral(ToolFormat):
    name = "mistral"
    markers = (OPENING, ARGS, CALL_ID)

    def __init__(self, has_args: bool = False) -> None:
        self._has_args = has_args  # calls are written in the later form

    @classmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        return cls(ARGS in template) if OPENING in template else None

    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        return BlockParser(tools, MistralReader, openings=(OPENING,), is_certain=is_certain)

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        if not self._has_args:
            write_list(lark, OPENING, None, tools, must_call=must_call, many=many)
            return
        calls = [f"{lark.text(tool.name)} {lark.marker(ARGS)} {lark.arguments(tool)}" for tool in tools]
        write_blocks(lark, OPENING, lark.calls(calls), None, must_call=must_call, many=many)
