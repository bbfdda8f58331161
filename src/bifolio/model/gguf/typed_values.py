"""Metadata values with their types: from text to the bytes of a GGUF file.

    u8 i8 u16 i16 u32 i32 u64 i64   integers     f32 f64   numbers     bool   true or false     str   text
    arr[u32]                        an array, written as JSON: [1, 2, 3]

The names are those that llama.cpp prints; the names of the gguf package (uint32, string) are read as well.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any, NamedTuple

from bifolio.errors import ConfigError, did_you_mean
from bifolio.model.gguf.reader import ARRAY, BOOL, FLOAT32, SCALAR_STRUCTS, STRING

_KINDS = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": FLOAT32, "bool": BOOL, "str": STRING,
          "u64": 10, "i64": 11, "f64": 12}  # fmt: skip
_NAMES = {kind: name for name, kind in _KINDS.items()}
_LONG_NAMES = {f"{sign}int{bits}": f"{sign or 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_LONG_NAMES |= {"float32": "f32", "float64": "f64", "string": "str"}
_FLOATS = (FLOAT32, _KINDS["f64"])
TYPE_NAMES = (*_KINDS, "arr[u32]")


class ValueType(NamedTuple):
    """The type of a value, and that of the items of an array."""

    kind: int  # the number in a GGUF file
    item: int | None = None

    def __str__(self) -> str:
        if self.item is None:
            return _NAMES[self.kind]
        return f"arr[{_NAMES.get(self.item, 'arr')}]"


def parse_type(name: str) -> ValueType:
    """The type called `name`; ConfigError lists the names."""
    text = name.strip().lower()
    inner = text[4:-1] if text.startswith("arr[") and text.endswith("]") else text
    inner = _LONG_NAMES.get(inner, inner)
    if inner not in _KINDS:
        hint = did_you_mean(text, TYPE_NAMES) or f": use one of {', '.join(TYPE_NAMES)}"
        raise ConfigError(f"there is no type {name!r}{hint}")
    return ValueType(_KINDS[inner]) if inner == text or text in _LONG_NAMES else ValueType(ARRAY, _KINDS[inner])


def type_of(kind: int, encoded: bytes) -> ValueType:
    """The type of a value in a file, from its kind and its bytes."""
    return ValueType(kind, struct.unpack_from("<I", encoded)[0]) if kind == ARRAY else ValueType(kind)


def encode_text(text: str, type: ValueType, key: str) -> bytes:
    """The bytes of a value that a user wrote; ConfigError says why the text is no value of the type."""
    if type.item is None:
        return _encode(_scalar(text, type.kind, key), type.kind, key)
    if type.item == ARRAY:
        raise ConfigError(f"{key} is an array of arrays, whose values cannot be set: keep, rename or remove it")
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        items = None
    if not isinstance(items, list):
        raise ConfigError(f"{key} has the type {type}, and {_shown(text)} is no JSON array: write for example [1, 2]")
    encoded = [_encode(_checked(item, type.item, key), type.item, key) for item in items]
    return struct.pack("<IQ", type.item, len(items)) + b"".join(encoded)


def encode_number(value: int, name: str) -> tuple[int, bytes]:
    """(Kind, bytes) of an integer of the type called `name`."""
    kind = _KINDS[name]
    return kind, SCALAR_STRUCTS[kind].pack(value)


def encode_string(text: str) -> bytes:
    """A string of a header: its length in bytes, then its bytes."""
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _scalar(text: str, kind: int, key: str) -> Any:
    """The value of a text; words that are no number stay text, which `_checked` refuses."""
    if kind == STRING:
        return text
    if kind == BOOL:
        return {"true": True, "false": False}.get(text.strip().lower(), text)
    try:
        return _checked(float(text) if kind in _FLOATS else int(text), kind, key)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        return _checked(text, kind, key)


def _checked(value: Any, kind: int, key: str) -> Any:
    """The value, if it has the Python type of `kind`."""
    wanted: tuple[type, ...] = (int,)
    if kind in (STRING, BOOL):
        wanted = (str,) if kind == STRING else (bool,)
    elif kind in _FLOATS:
        wanted = (int, float)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind != BOOL):
        raise ConfigError(f"{key} has the type {_NAMES[kind]}, and {_shown(value)} is no value of it")
    return value


def _encode(value: Any, kind: int, key: str) -> bytes:
    if kind == STRING:
        return _encoded_text(value, key)
    value = _checked(value, kind, key)
    try:
        encoded = SCALAR_STRUCTS[kind].pack(value)
    except (struct.error, OverflowError):
        raise ConfigError(f"{key} has the type {_NAMES[kind]}, whose range does not hold {_shown(value)}") from None
    if kind == FLOAT32 and math.isfinite(value) and not math.isfinite(SCALAR_STRUCTS[kind].unpack(encoded)[0]):
        raise ConfigError(f"{key} has the type f32, whose range does not hold {_shown(value)}")
    return encoded


def _encoded_text(value: str, key: str) -> bytes:
    try:
        return encode_string(value)
    except UnicodeEncodeError:
        raise ConfigError(f"the value of {key} is not UTF-8") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
