"""Server-sent events as bytes: most of a stream's events differ in their text alone, and only that is encoded."""

from __future__ import annotations

from typing import Any

import msgspec

from bifolio.serve.http.encoding import encode_json

Event = msgspec.Struct | bytes  # to be encoded, or a complete event


def encode_json_event(payload: dict[str, Any]) -> bytes:
    return b"data: " + encode_json(payload) + b"\n\n"


def encode_event(event: Event) -> bytes:
    return event if isinstance(event, bytes) else b"data: " + encode_json(event) + b"\n\n"


class TextEvents:
    """Events that are equal but for one text."""

    __slots__ = ("_after", "_before")

    def __init__(self, empty: msgspec.Struct, field: bytes) -> None:
        """`empty` is the event with an empty text; `field` is the name and the empty text as they are encoded."""
        before, found, after = encode_event(empty).partition(field)
        if not found or field in after:
            raise ValueError(f"{field!r} is not exactly once in {empty!r}")
        self._before, self._after = before + field[:-2], after

    def event(self, text: str) -> bytes:
        return self._before + encode_json(text) + self._after
