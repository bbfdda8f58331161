"""Types of request fields in words, with their bounds: for `/docs` and for the reference of the documentation."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

POWERS = {1 << 31: "2³¹", -(1 << 63): "-2⁶³", (1 << 63) - 1: "2⁶³ - 1"}


def type_text(kind: Any, struct: Callable[[str], str] = str, literal: Callable[[str], str] = str) -> str:
    """A type of `msgspec.inspect` in words; `struct` and `literal` write the names of objects and the constants."""

    def text(inner: Any) -> str:
        return type_text(inner, struct, literal)

    name = type(kind).__name__.removesuffix("Type")
    if name == "Union":
        return " or ".join(text(part) for part in kind.types if type(part).__name__ != "NoneType")
    if name in ("Int", "Float"):
        return ("integer" if name == "Int" else "number") + _range(kind)
    if name == "Str":
        return "text" + (f" of at most {number_text(kind.max_length)}" if kind.max_length else "")
    if name == "List":
        most = f", at most {number_text(kind.max_length)}" if kind.max_length else ""
        return f"list of {text(kind.item_type)}{most}"
    if name == "Literal":
        return ", ".join(literal(json.dumps(value)) for value in kind.values)
    if name == "Struct":
        return struct(kind.cls.__name__)
    if name == "Metadata":
        return text(kind.type)
    return {"Dict": "object", "Bool": "true or false"}.get(name, "any JSON")


def _range(kind: Any) -> str:
    low = f"above {number_text(kind.gt)}" if kind.gt is not None else "" if kind.ge is None else number_text(kind.ge)
    high = f"below {number_text(kind.lt)}" if kind.lt is not None else "" if kind.le is None else number_text(kind.le)
    if low and high:
        return f", {low} to {high}"
    return f", at least {low}" if low else f", at most {high}" if high else ""


def number_text(number: float) -> str:
    return POWERS.get(int(number)) or (f"{number:g}" if abs(number) < 1000 else f"{int(number):,}")
