"""`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`: Qwen3-Coder and later Qwen."""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.buffer import Marks
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat, write_blocks
from bifolio.text.tools.tagged import TaggedReader, properties_of, required_of, write_value

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"
END_PARAMETERS = Marks(END_PARAMETER)


class FunctionReader(TaggedReader):
    """Reads one function."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._state = "function"
        self._key = ""

    def _step(self) -> bool:
        if self._state == "function":
            if not self._expect(FUNCTION):
                return False
            self._state = "name"
        if self._state == "name":
            name = self._until(">")
            self._state = "name" if name is None else "tag"
            return name is not None and self._begin(name.strip())
        if self._state == "tag":
            return self._read_tag()
        if self._state == "key":
            key = self._until(">")
            if key is None:
                return False
            self._key, self._state = key.strip(), "value"
        return self._read_value()

    def _read_tag(self) -> bool:
        if not self.buffer.peek():
            return False
        is_end = self.buffer.starts(END_FUNCTION)
        if is_end:
            self.buffer.skip(len(END_FUNCTION))
            self._end()
        if is_end is not False:
            return bool(is_end)
        if not self._expect(PARAMETER):
            return False
        self._state = "key"
        return True

    def _read_value(self) -> bool:
        raw = self._text_before(END_PARAMETERS)
        if raw is None:
            return False
        self._state = "tag"
        return self._parameter(self._key, raw.removeprefix("\n").removesuffix("\n"))


class Qwen3Coder(ToolFormat):
    name = "qwen3_coder"
    markers = (OPENING, CLOSING)

    @classmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        return cls() if FUNCTION in template and PARAMETER in template else None

    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        return BlockParser(tools, FunctionReader, openings=(OPENING,), closing=CLOSING, is_certain=is_certain)

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        call = lark.calls([self._function(lark, tool) for tool in tools])
        write_blocks(lark, OPENING, f"SPACE {call} SPACE", CLOSING, must_call=must_call, many=many)

    def _function(self, lark: LarkWriter, tool: ToolSpec) -> str:
        parts = [lark.text(f"{FUNCTION}{tool.name}>")]
        if tool.is_strict:
            for key, schema in properties_of(tool).items():
                value = write_value(lark, schema, f"\n{END_PARAMETER}")
                opening = lark.text(f"\n{PARAMETER}{key}>\n")
                parts.append(f"({opening} {value}){'' if key in required_of(tool) else '?'}")
        else:
            value = lark.after_text(f"\n{END_PARAMETER}")
            opening, end = lark.text(f"\n{PARAMETER}"), lark.text(">\n")
            parts.append(f"({opening} /[^>\\n]{{1,200}}/ {end} {value})*")
        return " ".join([*parts, lark.text(f"\n{END_FUNCTION}")])
