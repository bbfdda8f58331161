"""`<|tool_call>call:NAME{key:value,...}<tool_call|>`: Gemma 4. Texts have marks of their own, keys are bare words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bifolio.text.strict_json import write_json
from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.buffer import Marks
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat, write_blocks
from bifolio.text.tools.literals import MAX_DEPTH, literal_to_json
from bifolio.text.tools.readers import ArgumentReader
from bifolio.text.tools.tagged import properties_of, required_of, write_value

OPENING, CLOSING, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
HEAD = "call:"
_BARE = r'[^\s<"{}\[\],:][^<"{}\[\],:]*+'  # spaces at its end included
_PIECE = re.compile(
    rf"""<\|"\|>(?P<text>.*?)<\|"\|>|(?P<json>"(?:[^"\\]|\\.)*+")|(?P<key>{_BARE})(?=:)|(?P<word>{_BARE})"""
    r"""|(?P<mark>[\[\]{},:])|\s++""",
    re.DOTALL,
)
_QUOTES = Marks(QUOTE)
_NOTABLE = re.compile(r'<\|"\|>|[\[\]{},]')


def gemma_to_json(text: str) -> str | None:
    """A value as JSON; None if it is none."""
    return literal_to_json(text, _PIECE, _rewritten)


def _rewritten(kind: str, piece: str, pieces: list[str]) -> str:
    return write_json(piece.strip() if kind == "key" else piece) if kind in ("text", "key") else piece


class GemmaReader(ArgumentReader):
    """Reads one call. A value ends at a comma or brace outside of texts and brackets."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._state = "head"
        self._key = ""
        self._depth, self._in_text = 0, False

    def _step(self) -> bool:
        if self._state == "value":
            return self._read_value()
        if self._state == "head":
            if not self._expect(HEAD):
                return False
            self._state = "name"
        if self._state == "name":
            name = self._until("{")
            if name is None:
                return False
            self._state = "key"
            return self._begin_call(name.strip())
        mark = self.buffer.peek()
        return self._read_key(mark) if mark else False

    def _read_key(self, mark: str) -> bool:
        if mark == "}":
            self.buffer.skip(1)
            self._end_arguments()
            self.is_complete = self.is_over = True
            return False
        if mark == "," and self._keys:
            self.buffer.skip(1)
            return True
        key = self._until(":")
        if key is None:
            return False
        key = key.strip().removeprefix(QUOTE).removesuffix(QUOTE)
        if not key or key in self._keys:
            return self._fail()
        self._key, self._state = key, "value"
        self._value, self._depth, self._in_text = [], 0, False
        return True

    def _read_value(self) -> bool:
        at = self.buffer.at
        while (found := self.buffer.search(_NOTABLE, at)) is not None:
            mark, at = found.group(), found.end()
            if mark == QUOTE:
                self._in_text = not self._in_text
            elif not self._in_text:
                if self._depth == 0 and mark in ",}":
                    return self._end_value(found.start())
                self._depth += (mark in "[{") - (mark in "]}")
                if not 0 <= self._depth <= MAX_DEPTH:
                    self._take_value(at)
                    return self._fail()
        length = len(self.buffer.text)
        self._take_value(
            length - _QUOTES.begun(self.buffer.text, at, length)
        )  # a part of a mark is read when it is whole
        return False

    def _end_value(self, end: int) -> bool:
        self._state = "key"
        self._take_value(end)
        return self._argument(self._key, gemma_to_json(self._whole_value().strip()))


class Gemma(ToolFormat):
    name = "gemma"
    markers = (OPENING, CLOSING, QUOTE)

    @classmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        return cls() if OPENING in template else None

    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        return BlockParser(tools, GemmaReader, openings=(OPENING,), closing=CLOSING, is_certain=is_certain)

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        _write_any(lark)
        call = lark.calls([f"{lark.text(f'{HEAD}{tool.name}')} {self._arguments(lark, tool)}" for tool in tools])
        write_blocks(lark, OPENING, call, CLOSING, must_call=must_call, many=many)

    def _arguments(self, lark: LarkWriter, tool: ToolSpec) -> str:
        if not tool.is_strict:
            return "any_object"
        return _object(lark, properties_of(tool), required_of(tool))


def _write_any(lark: LarkWriter) -> None:
    """The rules of values without a schema."""
    quoted = lark.rule("any_text", f"{lark.marker(QUOTE)} {lark.after_text(QUOTE)}")
    lark.rule("any_pair", '/[a-zA-Z_][a-zA-Z0-9_]*/ ":" any_value')
    lark.rule("any_object", '"{" (any_pair ("," any_pair)*)? "}"')
    lark.rule("any_list", '"[" (any_value ("," any_value)*)? "]"')
    lark.rule("any_value", f"{quoted} | {lark.schema({'type': ['number', 'boolean', 'null']})} | any_object | any_list")


def _value(lark: LarkWriter, schema: Any) -> str:
    """A value that follows a schema. Of texts, lists and objects it enforces types, choices and required keys alone."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return f"{lark.marker(QUOTE)} {write_value(lark, schema, QUOTE)}"
    if kind in ("integer", "number", "boolean", "null"):
        return lark.schema(schema)
    if kind == "array":
        item = lark.fresh_rule(_value(lark, schema.get("items")))
        return f'"[" ({item} ("," {item})*)? "]"'
    if kind == "object" and isinstance(schema.get("properties"), Mapping):
        required = schema.get("required")
        return _object(lark, schema["properties"], set(required) if isinstance(required, list) else set())
    return "any_object" if kind == "object" else "any_value"


def _object(lark: LarkWriter, properties: Mapping[str, Any], required: set[str]) -> str:
    """The properties in the order of their names, in which the template shows them."""
    bodies = {key: f"{lark.text(f'{key}:')} {_value(lark, properties[key])}" for key in sorted(properties)}
    pairs = [(key, lark.fresh_rule(body)) for key, body in bodies.items()]
    first = rest = ""  # the pairs from some pair on: with nothing before them, and behind another pair
    for key, pair in reversed(pairs):
        more = f"{pair} {rest}".rstrip()
        if key in required:
            first, rest = lark.fresh_rule(more), lark.fresh_rule(f'"," {more}')
        else:
            first = lark.fresh_rule(f"{more} | {first}" if first else f"({more})?")
            rest = lark.fresh_rule(f'"," {more} | {rest}' if rest else f'("," {more})?')
    return f'"{{" {first} "}}"' if first else '"{" "}"'
