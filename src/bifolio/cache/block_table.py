"""From token positions to blocks: a view of the block manager's rows, with no state of its own.

position p of a sequence  ->  block_ids[p // block_size], offset p % block_size
                          ->  slot = block_id * block_size + offset
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.block_pool import PADDING_BLOCK
from bifolio.cache.storage import KVStorage, Page
from bifolio.errors import CacheError, ConfigError


class BlockTable:
    """Looks up where tokens lie; changes go through the block manager's verbs.

    The methods that name no sequence (`allocate`, `free`, `get`) work on the table's own sequence: the one given as
    `sequence_id`, or else a private row that the first `allocate` opens and `close` releases.
    """

    def __init__(
        self, manager: KVCacheBlockManager, storage: KVStorage | None = None, *, sequence_id: int | None = None
    ) -> None:
        self._manager = manager
        self._storage = storage
        self.sequence_id = manager.fresh_sequence_id() if sequence_id is None else sequence_id

    @property
    def block_size(self) -> int:
        return self._manager.block_size

    # -- any sequence ------------------------------------------------------------------------------------------------

    def get_sequence_blocks(self, sequence_id: int) -> list[int]:
        """The sequence's blocks, in order of position."""
        return self._manager.row_block_ids(sequence_id)

    def append_block(self, sequence_id: int, block_id: int) -> None:
        """Continue the row with a block that another row holds at this place; nothing to do if it is there already."""
        self._manager.share(block_id, sequence_id)

    def allocate_and_append_block(self, sequence_id: int) -> int | None:
        """Give the row one more whole block; None when the pool is empty."""
        return self._manager.allocate_block(sequence_id)

    def lookup(self, sequence_id: int, token_index: int) -> tuple[int, int]:
        """(block id, offset in the block) of the token at `token_index`."""
        with self._manager.lock:
            self._check_range(sequence_id, token_index, token_index + 1)
            block_ids = self._manager.row_block_ids(sequence_id)
        return block_ids[token_index // self.block_size], token_index % self.block_size

    def slot_mapping(self, sequence_id: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """i64[end - start]: the slot of each token in [start, end)."""
        with self._manager.lock:
            self._check_range(sequence_id, start, end)
            block_ids = np.array(self._manager.row_block_ids(sequence_id), dtype=np.int64)
        positions = np.arange(start, end, dtype=np.int64)
        slots: npt.NDArray[np.int64] = block_ids[positions // self.block_size] * self.block_size
        return slots + positions % self.block_size

    def as_array(self, sequence_ids: Sequence[int], max_blocks: int | None = None) -> npt.NDArray[np.int32]:
        """i32[len(sequence_ids), max_blocks]: a row of block ids each, padded with block 0."""
        with self._manager.lock:
            rows = [self._manager.row_block_ids(sequence_id) for sequence_id in sequence_ids]
        longest = max((len(row) for row in rows), default=0)
        width = longest if max_blocks is None else max_blocks
        if longest > width:
            raise CacheError(f"a row has {longest} blocks and the table is {width} wide: raise max_blocks")
        table = np.full((len(rows), width), PADDING_BLOCK, dtype=np.int32)
        for index, row in enumerate(rows):
            table[index, : len(row)] = row
        return table

    # -- the table's own sequence ------------------------------------------------------------------------------------

    def allocate(self, seq_start: int) -> int | None:
        """The page for the positions from `seq_start` on, which must be the first uncovered one; None if out of pages.

        Pages have no holes between them: the first starts at 0, the next at `block_size`, and so on.
        """
        with self._manager.lock:
            covered = len(self._own_blocks()) * self.block_size
            if seq_start != covered:
                raise CacheError(f"the next page starts at position {covered}, not at {seq_start}")
            return self._manager.allocate_block(self.sequence_id)

    def free(self, page_ids: Iterable[int]) -> list[int]:
        """Give back pages from the end of the sequence, in any order; return those that nobody else holds."""
        unwanted = set(page_ids)
        with self._manager.lock:
            block_ids = self._own_blocks()
            num_kept = len(block_ids) - len(unwanted)
            if num_kept < 0 or set(block_ids[num_kept:]) != unwanted:
                raise CacheError(f"pages {sorted(unwanted)} are not the last ones of the sequence: {block_ids}")
            if not unwanted:
                return []
            return self._manager.truncate(self.sequence_id, num_kept * self.block_size)

    def get(self, seq_pos: int) -> Page | None:
        """The page that holds position `seq_pos`, or None when no page covers it."""
        if self._storage is None:
            raise ConfigError("pages are views of the storage: make the table with BlockTable(manager, storage)")
        with self._manager.lock:
            block_ids = self._own_blocks()
        if not 0 <= seq_pos < len(block_ids) * self.block_size:
            return None
        return self._storage.page(block_ids[seq_pos // self.block_size], self._manager)

    def close(self) -> list[int]:
        """Release the table's own row, if it is open; return the freed pages."""
        with self._manager.lock:
            return self._manager.release(self.sequence_id) if self._manager.has_row(self.sequence_id) else []

    # -- inside ------------------------------------------------------------------------------------------------------

    def _own_blocks(self) -> list[int]:
        return self._manager.row_block_ids(self.sequence_id) if self._manager.has_row(self.sequence_id) else []

    def _check_range(self, sequence_id: int, start: int, end: int) -> None:
        num_tokens = self._manager.row_num_tokens(sequence_id)
        if not 0 <= start <= end <= num_tokens:
            raise CacheError(f"tokens [{start}, {end}) are outside sequence {sequence_id}, which holds {num_tokens}")


PageTable = BlockTable
