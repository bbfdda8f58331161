"""Bounds on the bytes of free JSON in requests, read from the types of the fields: `Meta(extra={"max_bytes": n})`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from bifolio.serve.http.errors import bad_request


def check_bytes(request: msgspec.Struct) -> None:
    """Refuse a request with a field of more bytes than its type declares; msgspec has checked all other bounds."""
    for name, most in _limited_fields(type(request)):
        value = getattr(request, name)
        if most is not None and value is not None and not isinstance(value, bool):
            try:
                size = len(msgspec.json.encode(value))
            except (RecursionError, UnicodeEncodeError, msgspec.MsgspecError):
                raise bad_request(
                    f"{name} is nested too deeply or holds text that is not valid: send flatter JSON in UTF-8", name
                ) from None
            if size > most:
                raise bad_request(f"{name} has {size} bytes of JSON: at most {most} are accepted", name)
        elif most is None:
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, msgspec.Struct):
                    check_bytes(item)


@cache
def _limited_fields(kind: type[msgspec.Struct]) -> tuple[tuple[str, int | None], ...]:
    """(name, most bytes) of the fields with such a limit; None for fields that hold other structs."""
    described = inspect.type_info(kind)
    if not isinstance(described, inspect.StructType):
        raise TypeError(f"{kind.__name__} is no struct")
    found: list[tuple[str, int | None]] = []
    for field in described.fields:
        for part in parts(field.type):
            if isinstance(part, inspect.Metadata) and "max_bytes" in (part.extra or {}):
                found.append((field.name, (part.extra or {})["max_bytes"]))
            elif isinstance(part, inspect.StructType) or (
                isinstance(part, inspect.ListType)
                and any(isinstance(item, inspect.StructType) for item in parts(part.item_type))
            ):
                found.append((field.name, None))
    return tuple(dict.fromkeys(found))


def parts(described: Any) -> Iterator[Any]:
    """The alternatives of a union, or the one type."""
    if isinstance(described, inspect.UnionType):
        for item in described.types:
            yield from parts(item)
    else:
        yield described


def structs_in(described: Any) -> Iterator[inspect.StructType]:
    """The structs among the alternatives of a type, and in its lists."""
    for part in parts(described):
        inner = part.type if isinstance(part, inspect.Metadata) else part
        if isinstance(inner, inspect.StructType):
            yield inner
        elif isinstance(inner, inspect.ListType):
            yield from structs_in(inner.item_type)
