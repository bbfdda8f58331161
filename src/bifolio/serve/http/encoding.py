"""The one writer of JSON that the server sends, in every protocol."""

from __future__ import annotations

from typing import Any

import msgspec

from bifolio.text.strict_json import write_json

_encoder = msgspec.json.Encoder()


def encode_json(value: Any) -> bytes:
    """A value as strict JSON in UTF-8 (`text.strict_json`): NaN and infinity are null, halves of surrogates U+FFFD."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return write_json(msgspec.to_builtins(value)).encode()


class JsonList:
    """A long list as JSON, written piece by piece: the items of one piece are in memory at a time."""

    def __init__(self) -> None:
        self._text = bytearray(b"[")

    def extend(self, items: list[Any]) -> None:
        if items:
            self._text += encode_json(items)[1:-1] + b","

    def raw(self) -> Any:
        """The list, to be written in the place of a list; no item can be added after that."""
        if len(self._text) > 1:
            self._text.pop()  # the last comma
        self._text += b"]"
        return msgspec.Raw(self._text)
