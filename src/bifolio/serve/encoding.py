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
