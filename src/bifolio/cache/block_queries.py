"""The queries of the block manager: they read tables, blocks and states, and change none."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import takewhile
from threading import RLock

import numpy as np
import numpy.typing as npt

from bifolio.cache.block_pool import BlockPool
from bifolio.cache.block_table import BlockTable, count_needed_blocks, find_table, merge_appends, padded
from bifolio.cache.digests import find_chain, root_digest
from bifolio.cache.invariants import filled_entries
from bifolio.cache.states import StateStats
from bifolio.cache.storage import Page
from bifolio.cache.table_states import TableStates
from bifolio.counts import whole
from bifolio.errors import CacheError
from bifolio.images import Mark


class _Either:
    """The union of two containers."""

    def __init__(self, first: Container[bytes], second: Container[bytes]) -> None:
        self._first, self._second = first, second

    def __contains__(self, digest: object) -> bool:
        return digest in self._first or digest in self._second


class BlockQueries:
    """The read-only half of `KVCacheBlockManager`; every public method takes its lock."""

    num_blocks: int
    block_size: int
    lock: RLock
    _tables: dict[int, BlockTable]
    _pool: BlockPool
    _states: TableStates | None

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        with self.lock:
            return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that are held by a table or read by a pending move."""
        return self.num_blocks - 1 - self.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by content, whether a table holds them or not."""
        return len(self._pool.cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        if type(num_tokens) is not int or num_tokens < 0:
            num_tokens = whole("a number of tokens", num_tokens)
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, appends: Iterable[tuple[int, int]]) -> int:
        """The exact number of free blocks these (sequence_id, num_tokens) appends take together, in any order.

        n tables that share a partly filled last block need n-1 copies: the last one to write keeps the original.
        """
        with self.lock:
            return count_needed_blocks(merge_appends(appends), self._tables, self._pool, self.block_size)

    def has_table(self, sequence_id: int) -> bool:
        return isinstance(sequence_id, int) and sequence_id in self._tables

    def sequence_ids(self) -> list[int]:
        """The sequences that have a block table."""
        with self.lock:
            return list(self._tables)

    def table(self, sequence_id: int) -> BlockTable:
        """The sequence's table, for reading; the verbs below change it."""
        return find_table(self._tables, sequence_id)

    def block_ids_of(self, sequence_id: int) -> list[int]:
        """The sequence's blocks, in order of position (a copy)."""
        with self.lock:
            return list(find_table(self._tables, sequence_id).block_ids)

    def num_tokens_of(self, sequence_id: int) -> int:
        """Tokens that the sequence has room for."""
        return find_table(self._tables, sequence_id).num_tokens

    def tables_array(self, sequence_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        """i32[len(sequence_ids), longest]: the block ids of each sequence, padded with block 0."""
        with self.lock:
            return padded([find_table(self._tables, sequence_id).block_ids for sequence_id in sequence_ids])

    def ref_count(self, block_id: int) -> int:
        """Tables that hold the block."""
        return self._pool.ref_counts[self._checked(block_id)]

    def reference_counts(self) -> dict[int, int]:
        """Number of tables that hold each block, for blocks held by at least one."""
        with self.lock:
            return {block_id: count for block_id, count in enumerate(self._pool.ref_counts) if count}

    def block_users(self, block_id: int) -> list[int]:
        """The sequences whose tables hold the block (a scan over all tables)."""
        with self.lock:
            self._checked(block_id)
            return [sequence_id for sequence_id, table in self._tables.items() if block_id in table.block_ids]

    def get_block(self, block_id: int) -> Page:
        """Reference count, used entries and cached state of one block (a scan over all tables)."""
        with self.lock:
            filled = filled_entries(self._tables, self.block_size)
            return self._page(self._checked(block_id), filled[block_id])

    def pages(self) -> list[Page]:
        """Every block that a table holds or that can be found by content, in one pass."""
        with self.lock:
            filled = filled_entries(self._tables, self.block_size)
            known = sorted({*filled, *self._pool.cached.values()})
            return [self._page(block_id, filled[block_id]) for block_id in known]

    def utilisation(self) -> float:
        """Reserved tokens over the capacity of all blocks in use; 1.0 when none is in use."""
        with self.lock:
            filled = filled_entries(self._tables, self.block_size)
            return filled.total() / (len(filled) * self.block_size) if filled else 1.0

    def cached_prefix_length(
        self,
        token_ids: Sequence[int],
        *,
        salt: bytes = b"",
        max_cached: int | None = None,
        marks: tuple[Mark, ...] = (),
    ) -> int:
        """Number of tokens that `open_table` would find; opens no table."""
        with self.lock:
            chain = self._find_prefix(token_ids, root_digest(salt), max_cached, marks)
            count = len(chain) if self._states is None else self._states.usable(chain)
            return count * self.block_size

    def further_prefix(
        self,
        token_ids: Sequence[int],
        salt: bytes,
        marks: tuple[Mark, ...],
        blocks: Container[bytes],
        states: Container[bytes],
    ) -> tuple[int, list[bytes]]:
        """(Leading blocks that `open_table` would find, digests of the following ones that a tier has).

        `blocks` and `states` are the digests of the tier. Blocks of a hybrid are of use up to its last state.
        """
        with self.lock:
            known, root = _Either(self._pool.cached, blocks), root_digest(salt)
            size = self.block_size
            chain = find_chain(known, root, token_ids, (len(token_ids) - 1) // size, size, marks)
            held = next((place for place, digest in enumerate(chain) if digest not in self._pool.cached), len(chain))
            if self._states is not None:
                held = self._states.usable(chain[:held])
            further = list(takewhile(blocks.__contains__, chain[held:]))
            if self._states is not None:
                while further and further[-1] not in states:
                    further.pop()
            return held, further

    def cached_block(self, digest: bytes) -> int | None:
        """The block with this content; the caller holds the lock while it reads it."""
        return self._pool.cached.get(digest)

    def cached_state(self, digest: bytes) -> int | None:
        """The checkpoint behind the block of this digest; the caller holds the lock while it reads it."""
        return None if self._states is None else self._states.pool.checkpoints.get(digest)

    def state_stats(self) -> StateStats:
        """Counts of the recurrent states; all 0 for a model without recurrent layers."""
        with self.lock:
            return StateStats() if self._states is None else self._states.stats()

    # -- internal ----------------------------------------------------------------------------------------------------

    def _checked(self, block_id: int) -> int:
        if not 0 <= whole("a block id", block_id, least=None) < self.num_blocks:
            raise CacheError(f"there is no block {block_id}: the cache has blocks 0 to {self.num_blocks - 1}")
        return block_id

    def _page(self, block_id: int, used: int) -> Page:
        return Page(block_id, used, self._pool.ref_counts[block_id], self._pool.digests[block_id] is not None)

    def _find_prefix(
        self, token_ids: Sequence[int], root: bytes, max_cached: int | None, marks: Sequence[Mark] = ()
    ) -> list[bytes]:
        """Digests of the leading full blocks that are cached, short of the last token."""
        if max_cached is not None:
            max_cached = whole("max_cached", max_cached)
        size = self.block_size
        limit = len(token_ids) - 1 if max_cached is None else min(len(token_ids) - 1, max_cached)
        try:
            return find_chain(self._pool.cached, root, token_ids, limit // size, size, marks)
        except (TypeError, OverflowError):
            raise CacheError("token ids are whole numbers of 32 bits") from None
