"""Digests of block contents, chained: equal digests mean equal prefixes.

    root(salt) --tokens of block 0--> digest 0 --tokens of block 1--> digest 1 ...

The keys and values of a block depend on every token before it, so a block's digest covers its whole prefix. Tenants
with different salts never share a digest, hence never a block: a cache hit cannot reveal another tenant's prompt.
Tokens of an image have the same ids in every prompt: a mark with the digest of its pixels tells them apart.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import CacheError
from bifolio.images import Mark

TokenIds = Sequence[int] | NDArray[np.int32]
DIGEST_BYTES = 16  # 2^64 blocks before a collision is likely


def marks_in(marks: Sequence[Mark], start: int, end: int) -> bytes:
    """The marks of a block [start, end), and where they begin; empty without any."""
    found = (mark for mark in marks if mark.start < end and start < mark.end)
    return b"".join((mark.start - start).to_bytes(8, "little", signed=True) + mark.digest for mark in found)


def root_digest(salt: bytes) -> bytes:
    """Digest of the empty prefix under `salt`."""
    if not isinstance(salt, bytes):
        raise CacheError(f"a salt is bytes, not {type(salt).__name__}")
    return blake2b(salt, digest_size=DIGEST_BYTES, person=b"bifolio-root").digest()


def next_digest(parent: bytes, token_ids: TokenIds, marks: bytes = b"") -> bytes:
    """Digest of the prefix of `parent` extended by one full block of `token_ids` (int32 each), with its marks."""
    words = token_ids.tobytes() if isinstance(token_ids, np.ndarray) else array("i", token_ids).tobytes()
    return blake2b(parent + words + marks, digest_size=DIGEST_BYTES).digest()


def find_chain(
    known: Container[bytes],
    root: bytes,
    token_ids: Sequence[int],
    max_blocks: int,
    block_size: int,
    marks: Sequence[Mark] = (),
) -> list[bytes]:
    """Digests of the leading full blocks of `token_ids`, up to the first that is not `known`."""
    chain: list[bytes] = []
    for start in range(0, max_blocks * block_size, block_size):
        end = start + block_size
        own = marks_in(marks, start, end) if marks else b""
        digest = next_digest(chain[-1] if chain else root, token_ids[start:end], own)
        if digest not in known:
            break
        chain.append(digest)
    return chain
