"""The verbs of the block manager for conversations (`cache.retention`)."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from threading import RLock

from bifolio.cache.block_pool import BlockPool
from bifolio.cache.block_table import BlockTable, find_table
from bifolio.cache.retention import Session
from bifolio.images import PromptImage
from bifolio.sessions import SessionHint


class RetainingBlocks:
    """The verbs of `KVCacheBlockManager` for conversations."""

    lock: RLock
    _tables: dict[int, BlockTable]
    _pool: BlockPool

    def protect(
        self,
        sequence_id: int,
        owner: str,
        hint: SessionHint,
        token_ids: Sequence[int],
        salt: bytes,
        adapter: bytes = b"",
        images: tuple[PromptImage, ...] = (),
    ) -> None:
        """Evict the committed blocks of a sequence last, when it has ended."""
        with self.lock:
            chain = tuple(find_table(self._tables, sequence_id).chain)
            expires = math.inf if hint.pin else time.monotonic() + hint.seconds
            tokens = array("i", token_ids) if hint.pin else None
            session = Session(owner, hint, chain, len(token_ids), salt, expires, tokens, adapter)
            session.images = images if hint.pin else ()
            self._pool.retention.note(session)

    def sessions(self) -> list[tuple[Session, int]]:
        """All conversations, the newest first, with the number of their blocks in the cache."""
        with self.lock:
            self._pool.retention.sweep()
            cached = self._pool.cached
            return [(one, sum(digest in cached for digest in one.digests)) for one in self._pool.retention.sessions()]

    def has_session(self, owner: str, name: str) -> bool:
        return self._pool.retention.has(owner, name)

    def release_session(self, owner: str, name: str) -> bool:
        """Forget a conversation; False if there is none."""
        with self.lock:
            return self._pool.retention.release(owner, name)
