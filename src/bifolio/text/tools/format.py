"""The interface of a format of tool calls, and the writer of the grammars that enforce it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from bifolio.text.strict_json import write_json
from bifolio.text.tools.events import AnswerReader, Tools, ToolSpec

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_NOTES = frozenset({"description", "title", "examples", "default", "$comment", "deprecated"})
_SCHEMA_MAPS = frozenset({"properties", "$defs", "definitions", "patternProperties"})  # their keys are names


class ToolFormat(ABC):
    """How a family of models writes calls."""

    name: ClassVar[str]
    markers: tuple[str, ...] = ()  # texts that are special tokens in some vocabularies, and are kept in the answer
    has_channels: ClassVar[bool] = False  # reasoning, answer and calls are channels that the format itself marks

    @classmethod
    @abstractmethod
    def from_template(cls, template: str) -> ToolFormat | None:
        """The format, if the template of a model writes it."""

    @abstractmethod
    def reader(self, tools: Tools, is_certain: bool = False) -> AnswerReader:
        """A new reader of one answer. `is_certain`: a grammar guarantees the calls, so they need no check."""

    @abstractmethod
    def write(self, lark: LarkWriter, tools: Sequence[ToolSpec], *, must_call: bool, many: bool) -> None:
        """Write the rule `start` of an answer: calls alone (`must_call`), or free text with calls in it."""


class LarkWriter:
    """Collects the rules of a grammar in llguidance's dialect of Lark, and the JSON schemas that they refer to."""

    def __init__(self, token_ids: Mapping[str, int] | None = None) -> None:
        """`token_ids`: the markers that are tokens of their own in the vocabulary."""
        self._token_ids = token_ids or {}
        self._rules: list[str] = []
        self._schemas: list[Any] = []

    def rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name

    def fresh_rule(self, body: str) -> str:
        return self.rule(f"rule_{len(self._rules)}", body)

    def text(self, text: str) -> str:
        return write_json(text)

    def marker(self, text: str) -> str:
        """A marker, as one token or spelled out."""
        token = self._token_ids.get(text)
        return self.text(text) if token is None else f"(<[{token}]> | {self.text(text)})"

    def after_text(self, marker: str) -> str:
        """Free text up to the first occurrence of a marker, with the marker."""
        number, token = len(self._rules), self._token_ids.get(marker)
        self.rule(f"spelled_{number}[lazy]", f"TEXT {self.text(marker)}")
        return self.fresh_rule(f"spelled_{number}" if token is None else f"spelled_{number} | TEXT <[{token}]>")

    def arguments(self, tool: ToolSpec) -> str:
        """A JSON object: one that follows the schema of the tool if it is strict."""
        return self.schema(tool.parameters if tool.is_strict and tool.parameters else {"type": "object"})

    def schema(self, schema: Mapping[str, Any]) -> str:
        """JSON that follows a schema, with the spaces that templates write."""
        self._schemas.append({**without_notes(dict(schema)), "x-guidance": _SEPARATORS})
        return f"schema_{len(self._schemas) - 1}"

    def json_call(self, tool: ToolSpec, key: str = "arguments") -> str:
        """`{"name": "...", "arguments": {...}}`."""
        head = f'{{"name": {write_json(tool.name)}, "{key}": '
        return f'{self.text(head)} {self.arguments(tool)} "}}"'

    def calls(self, calls: Sequence[str]) -> str:
        """One of several calls, as a rule."""
        return self.rule("call", " | ".join(calls))

    def source(self) -> str:
        """The text of a grammar of the kind `tools`."""
        rules = ["%llguidance {}", *self._rules, r"TEXT: /(.|\n)*/", r"SPACE: /[ \n]{0,4}/"]
        return write_json({"rules": "\n".join(rules), "schemas": self._schemas})


def without_notes(schema: Any) -> Any:
    """The schema without texts for people, which cost room and enforce nothing."""
    if isinstance(schema, list):
        return [without_notes(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for key, value in schema.items():
        if key in _SCHEMA_MAPS and isinstance(value, dict):
            result[key] = {name: without_notes(inner) for name, inner in value.items()}
        elif key in ("enum", "const"):
            result[key] = value
        elif key not in _NOTES:
            result[key] = without_notes(value)
    return result


def write_blocks(
    lark: LarkWriter, opening: str, body: str, closing: str | None, *, must_call: bool, many: bool, repeats: bool = True
) -> None:
    """Write `start` for blocks `opening body closing`; `repeats`: each call has a block of its own."""
    end = "" if closing is None else lark.marker(closing)
    several = many and repeats
    if must_call:
        block = lark.rule("block", f"{lark.marker(opening)} {body} {end}")
        lark.rule("start", f"{block} (SPACE {block})*" if several else block)
    else:
        block = lark.rule("block", f"{lark.after_text(opening)} {body} {end}")
        lark.rule("start", f"{block}* TEXT" if several else f"{block} | TEXT")
