"""The adapter of a request as a part of the salt of its cached blocks.

    |0xff|digest of the adapter, 16 bytes|salt of the request|

A salt of a client is text in UTF-8 behind the salt of its key, so that none can name an adapter.
"""

from __future__ import annotations

from typing import Any

MARK = b"\xff"


def digest_of_adapter(adapter: Any) -> bytes:
    """Of an `engine.adapters.LoadedAdapter`; empty for None, the base."""
    return b"" if adapter is None else bytes(adapter.digest)


def salt_of_adapter(digest: bytes, salt: bytes) -> bytes:
    """The salt for blocks of an adapter with this digest; empty: of the base."""
    return MARK + digest + salt if digest else salt
