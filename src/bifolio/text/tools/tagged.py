"""Parameters between tags, whose types are in the schema: shared by Qwen3-Coder and GLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bifolio.text.strict_json import write_json
from bifolio.text.tools.buffer import Marks
from bifolio.text.tools.events import Tools, ToolSpec
from bifolio.text.tools.format import LarkWriter
from bifolio.text.tools.readers import ArgumentReader


class TaggedReader(ArgumentReader):
    """A reader of parameters whose types the schema says."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools)
        self._name = ""

    def _begin(self, name: str) -> bool:
        self._name = name
        return self._begin_call(name)

    def _parameter(self, key: str, raw: str) -> bool:
        return self._argument(key, typed_value(raw, property_of(self.tools[self._name], key)))

    def _text_before(self, closing: Marks) -> str | None:
        """The value before a tag, which is skipped; None while the tag has not come."""
        text, found = self.buffer.take_before(closing)
        self._value.append(text)
        return self._whole_value() if found else None

    def _end(self) -> None:
        self._end_arguments()
        self.is_complete = self.is_over = True


def property_of(tool: ToolSpec, key: str) -> Mapping[str, Any]:
    """The schema of one parameter; empty if the tool declares none."""
    properties = tool.parameters.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def typed_value(raw: str, schema: Mapping[str, Any]) -> str:
    """A value as JSON: text where the schema says so, JSON where it is JSON, and text otherwise: NaN is text."""
    if schema.get("type") != "string":
        try:
            return write_json(json.loads(raw, parse_constant=_refuse))
        except (ValueError, RecursionError):
            pass
        if raw.strip() in ("True", "False", "None"):
            return {"True": "true", "False": "false", "None": "null"}[raw.strip()]
    return write_json(raw)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def write_value(lark: LarkWriter, schema: Mapping[str, Any], closing: str) -> str:
    """A value with the tag that ends it: text runs to the tag, other types are JSON."""
    if not schema or (schema.get("type") == "string" and "enum" not in schema):
        return lark.after_text(closing)
    if schema.get("type") == "string":
        values = [item for item in schema["enum"] if isinstance(item, str)]
        return "(" + " | ".join(map(lark.text, values)) + f") {lark.marker(closing)}"
    return f"{lark.schema(schema)} {lark.marker(closing)}"


def required_of(tool: ToolSpec) -> set[str]:
    required = tool.parameters.get("required")
    return {key for key in required if isinstance(key, str)} if isinstance(required, list) else set()


def properties_of(tool: ToolSpec) -> Mapping[str, Any]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}
