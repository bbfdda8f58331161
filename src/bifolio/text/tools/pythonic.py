"""`[name(key=value, ...), ...]` as the whole answer: Llama 3.2 and 4, and others that write calls as Python."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bifolio.text.strict_json import write_json
from bifolio.text.tools.blocks import BlockParser
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter, ToolFormat
from bifolio.text.tools.literals import MAX_DEPTH, literal_to_json
from bifolio.text.tools.readers import ArgumentReader
from bifolio.text.tools.tagged import properties_of, required_of

_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_NO_NAME = re.compile(r"[^\w.\-\s]")
_PIECE = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<word>[A-Za-z_]\w*)|(?P<number>-?\d[\d.eE+\-]*)|(?P<mark>[\[\]{}(),:])|\s+""",
    re.DOTALL,
)
_NOTABLE = re.compile(r"""["'\\\[\]{}(),]""")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v", "\n": ""}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)


def python_to_json(text: str) -> str | None:
    """A Python literal as JSON; None if it is no literal. Texts, numbers, lists, tuples, dicts, True, False, None."""
    return literal_to_json(text, _PIECE, _rewritten)


def _rewritten(kind: str, piece: str, pieces: list[str]) -> str:
    if kind == "text":
        return write_json(_ESCAPE.sub(_unescaped, piece[1:-1]))
    if kind == "mark" and piece in ")]}" and pieces and pieces[-1] == ",":
        pieces.pop()
    return {"(": "[", ")": "]"}.get(piece, piece)


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code[0] in "ux" and len(code) > 1:
        return chr(int(code[1:], 16))
    return _ESCAPES.get(code, code if code in "\\'\"" else "\\" + code)


class PythonicReader(ArgumentReader):
    """Reads a list of calls. A value ends at a comma or bracket outside of texts and brackets."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._state = "start"
        self._key = ""
        self._num_named = 0  # characters of an incomplete name that were checked
        self._depth, self._quote, self._is_escaped = 0, "", False

    def _step(self) -> bool:
        if self._state == "value":
            return self._read_value()
        mark = self.buffer.peek()
        if not mark:
            return False
        if self._state == "start":
            return self._mark(mark, {"[": "name"})
        if self._state == "name":
            return self._read_name()
        if self._state == "key":
            return self._read_key(mark)
        if mark == "]":
            self.is_complete = self.is_over = True
        return self._mark(mark, {",": "name", "]": "end"}) and not self.is_over

    def _mark(self, mark: str, states: dict[str, str]) -> bool:
        if mark not in states:
            return self._fail()
        self.buffer.skip(1)
        self._state = states[mark]
        return True

    def _word(self, end: str) -> str | None:
        """A name with the mark behind it."""
        word = self._until(end)
        if word is None:
            self.is_broken |= self.buffer.search(_NO_NAME, self.buffer.at + self._num_named) is not None
            self._num_named = len(self.buffer)
            return None
        self._num_named = 0
        if not _NAME.fullmatch(word.strip()):
            self.buffer.unread(word + end)
            self.is_broken = True
            return None
        return word.strip()

    def _read_name(self) -> bool:
        name = self._word("(")
        if name is None:
            return False
        self._state = "key"
        return self._begin_call(name)

    def _read_key(self, mark: str) -> bool:
        if mark == ")":
            self._end_arguments()
            return self._mark(mark, {")": "after"})
        if mark == "," and self._keys:
            self.buffer.skip(1)
            return True
        key = self._word("=")
        if key is None:
            return False
        if key in self._keys:
            return self._fail()
        self._key, self._state = key, "value"
        self._value, self._depth, self._quote, self._is_escaped = [], 0, "", False
        return True

    def _read_value(self) -> bool:
        at, length = self.buffer.at, len(self.buffer.text)
        while at < length:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = self.buffer.search(_NOTABLE, at)
            if found is None:
                break
            mark = found.group()
            if not self._quote and self._depth == 0 and mark in ",)":
                return self._end_value(found.start())
            at = found.end()
            if self._quote:
                self._is_escaped = mark == "\\"
                self._quote = "" if mark == self._quote else self._quote
            elif mark in "\"'":
                self._quote = mark
            else:
                self._depth += (mark in "[{(") - (mark in "]})")
                if not 0 <= self._depth <= MAX_DEPTH:
                    self._take_value(at)
                    return self._fail()
        self._take_value(length)
        return False

    def _end_value(self, end: int) -> bool:
        self._state = "key"
        self._take_value(end)
        return self._argument(self._key, python_to_json(self._whole_value().strip()))


class Pythonic(ToolFormat):
    name = "pythonic"
    markers = ("<|python_start|>", "<|python_end|>")

    @classmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        is_shown = re.search(r"\[\s*func_?name\d?\(\s*\w+\s*=", template) or "<|python_start|>" in template
        return cls() if is_shown else None

    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        openings = ("<|python_start|>",)
        return BlockParser(tools, PythonicReader, openings=openings, at_start="[", is_certain=is_certain)

    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        call = lark.calls([self._call(lark, tool) for tool in tools])
        calls = f'"[" {call} (", " {call})* "]"' if many else f'"[" {call} "]"'
        if must_call:
            lark.rule("start", calls)
        else:
            lark.rule("start", f"{calls} | OTHER?")
            lark.rule("OTHER", r"/[^\[](.|\n)*/")

    def _call(self, lark: LarkWriter, tool: ToolSpec) -> str:
        head = lark.text(f"{tool.name}(")
        if not tool.is_strict:
            item = f'/[a-zA-Z_][a-zA-Z0-9_]*/ "=" {lark.schema({})}'
            return f'{head} ({item} (", " {item})*)? ")"'
        required = required_of(tool)
        items = {key: f"{lark.text(f'{key}=')} {lark.schema(schema)}" for key, schema in properties_of(tool).items()}
        body = ' ", " '.join(item for key, item in items.items() if key in required)
        optional = self._any_of(lark, [item for key, item in items.items() if key not in required])
        if optional and body:
            body = f'{body} (", " {optional})?'
        elif optional:
            body = f"({optional})?"
        return f'{head} {body} ")"'

    def _any_of(self, lark: LarkWriter, items: Sequence[str]) -> str:
        """One or more of the items in their order, with commas between them."""
        rule = ""
        for item in reversed(items):
            body = item if not rule else f'{item} (", " {rule})? | {rule}'
            rule = lark.fresh_rule(body)
        return rule
