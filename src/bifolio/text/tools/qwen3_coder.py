"""`<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>`: Qwen3-Coder and later Qwen."""

from __future__ import annotations

from collections.abc import Sequence

from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat, write_blocks
from bifolio.text.tools.readers import MAX_NAME_CHARS
from bifolio.text.tools.tagged import TaggedReader, properties_of, required_of, write_value

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER = "<function=", "<parameter="
END_FUNCTION, END_PARAMETER = "</function>", "</parameter>"


class FunctionReader(TaggedReader):
    """Reads one function."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._key: str | None = None
        self._in_function = False

    def _step(self) -> bool:
        if self._key is not None:
            return self._read_value(self._key)
        if not self._peek() or self.is_complete:
            return False
        expected = (PARAMETER, END_FUNCTION) if self._in_function else (FUNCTION,)
        tag = next((tag for tag in expected if self.text.startswith(tag, self.at)), None)
        if tag is None:
            rest = self.rest
            return False if any(one.startswith(rest) for one in expected) else self._fail()
        if tag == END_FUNCTION:
            self.at += len(tag)
            self._end()
            return True
        start = self.at
        self.at += len(tag)
        name = self._until(">", MAX_NAME_CHARS)
        if name is None:
            self.at = start
            return False
        if tag == PARAMETER:
            self._key = name.strip()
            return True
        self._in_function = True
        return self._begin(name.strip())

    def _read_value(self, key: str) -> bool:
        raw = self._until(END_PARAMETER)
        if raw is None:
            return False
        self._key = None
        return self._parameter(key, raw.removeprefix("\n").removesuffix("\n"))


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
