"""`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`: GLM 4.5 and later."""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.buffer import Marks
from bifolio.text.tools.events import AnswerReader, Part, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat, write_blocks
from bifolio.text.tools.tagged import TaggedReader, properties_of, required_of, write_value

OPENING, CLOSING = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
END_VALUES = Marks(END_VALUE)


class ArgumentsReader(TaggedReader):
    """Reads one call: the name runs to the first key, or to the end of the block."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._state = "name"
        self._key = ""

    def _step(self) -> bool:
        if self._state == "name":
            name = self._until(KEY)
            if name is None:
                return False
            self._state = "key"
            return self._begin(name.strip())
        if self._state == "key":
            key = self._until(END_KEY)
            if key is None:
                return False
            self._key, self._state = key.strip(), "value"
            return True
        if self._state == "text":
            raw = self._text_before(END_VALUES)
            if raw is None:
                return False
            self._state = "next"
            return self._parameter(self._key, raw)
        tag, state = (VALUE, "text") if self._state == "value" else (KEY, "key")
        if not self._expect(tag):
            return False
        self._state = state
        return True

    def close(self) -> list[Part]:
        if self._state == "name" and not self.is_broken and self._begin(self.buffer.rest.strip()):
            self.buffer.take()
            self._end()
        elif self._state == "next" and not self.is_broken and not len(self.buffer):
            self._end()
        events, self.events = self.events, []
        return events


class Glm(ToolFormat):
    name = "glm"
    markers = (OPENING, CLOSING, KEY, END_KEY, VALUE, END_VALUE)

    @classmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        return cls() if KEY in template and OPENING in template else None

    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        return BlockParser(tools, ArgumentsReader, openings=(OPENING,), closing=CLOSING, is_certain=is_certain)

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        call = lark.calls([self._call(lark, tool) for tool in tools])
        write_blocks(lark, OPENING, f"SPACE {call} SPACE", CLOSING, must_call=must_call, many=many)

    def _call(self, lark: LarkWriter, tool: ToolSpec) -> str:
        parts = [lark.text(tool.name)]
        key, end_key, value = lark.marker(KEY), lark.marker(END_KEY), lark.marker(VALUE)
        if tool.is_strict:
            for name, schema in properties_of(tool).items():
                body = write_value(lark, schema, END_VALUE)
                part = f"SPACE {key} {lark.text(name)} {end_key} SPACE {value} {body}"
                parts.append(f"({part}){'' if name in required_of(tool) else '?'}")
        else:
            body = lark.after_text(END_VALUE)
            parts.append(f"(SPACE {key} /[^<\\n]{{1,200}}/ {end_key} SPACE {value} {body})*")
        return " ".join(parts)
