"""The bytes of a block in every storage that a later request reads: the target's, and a draft head's beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bifolio.engine.speculative.head_runner import HeadBlocks
from bifolio.kernels.block_copies import BlockCopies, HostRead
from bifolio.kernels.storage import BlockMover, KVStorage

COUNT_BYTES = 4  # of the entries of a draft head
HEAD_SECONDS = 1.0


class BlockContent:
    """Reads and writes blocks and recurrent states of one engine; the caller holds the block manager's lock.

    |<- keys and values of the target ->|<- entries u32 ->|<- keys and values of the head ->|

    A device's blocks have the target's part alone: a draft head computes its entries again.
    """

    def __init__(self, storage: KVStorage, others: list[BlockMover], copies: BlockCopies | None = None) -> None:
        self._storage = storage
        self.copies = copies  # of a device; None: the cache is in host memory
        self._head = next((one for one in others if isinstance(one, HeadBlocks)), None)
        self._kept_head = self._head if copies is None else None
        self._size = storage.layout.bytes_per_block
        self.block_bytes = self._size
        if self._kept_head is not None:
            self.block_bytes += COUNT_BYTES + self._kept_head.storage.layout.bytes_per_block

    @property
    def delay(self) -> float:
        """Seconds until a block that was computed is complete: a draft head computes its entries some steps later."""
        return HEAD_SECONDS if self._kept_head is not None else 0.0

    @property
    def state_bytes(self) -> int:
        return self._storage.layout.bytes_per_state

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Host memory for content."""
        return np.empty(num_bytes, np.uint8) if self.copies is None else self.copies.allocate(num_bytes)

    def read(self, block_id: int) -> HostRead:
        """A copy, on its way from a device."""
        if self.copies is not None:
            return self.copies.read_block(block_id)
        own = self._storage.read_block(block_id)
        if self._kept_head is None:
            return HostRead.of(own)
        count = np.array([self._kept_head.filled[block_id]], np.uint32).view(np.uint8)
        return HostRead.of(np.concatenate([own, count, self._kept_head.storage.read_block(block_id)]))

    def read_state(self, state: int) -> HostRead:
        return HostRead.of(self._storage.read_state(state)) if self.copies is None else self.copies.read_state(state)

    def of_target(self, block: np.ndarray) -> np.ndarray:
        """The target's part of a block."""
        return block[: self._size]

    def write_head(self, block_id: int, block: np.ndarray) -> None:
        """Store the draft head's part of a block."""
        if self._kept_head is not None:
            start = self._size + COUNT_BYTES
            count = int(block[self._size : start].view(np.uint32)[0])
            self._kept_head.storage.write_block(block_id, block[start:])
            self._kept_head.filled[block_id] = min(count, self._kept_head.block_size)
            self._kept_head.is_untouched = False

    def forget_head(self, block_ids: Sequence[int]) -> None:
        """Blocks get new content without entries of the draft head."""
        if self._head is not None:
            self._head.filled[list(block_ids)] = 0
