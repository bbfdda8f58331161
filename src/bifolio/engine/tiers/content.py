"""The bytes of a block in every storage that a later request reads: the target's, and a draft head's beside it."""

from __future__ import annotations

import numpy as np

from bifolio.engine.speculative.head_runner import HeadBlocks
from bifolio.kernels.storage import BlockMover, KVStorage

COUNT_BYTES = 4  # of the entries of a draft head
HEAD_SECONDS = 1.0


class BlockContent:
    """Reads and writes blocks and recurrent states of one engine; the caller holds the block manager's lock.

    |<- keys and values of the target ->|<- entries u32 ->|<- keys and values of the head ->|
    """

    def __init__(self, storage: KVStorage, others: list[BlockMover]) -> None:
        self._storage = storage
        self._head = next((one for one in others if isinstance(one, HeadBlocks)), None)
        self._size = storage.layout.bytes_per_block
        self.block_bytes = self._size
        if self._head is not None:
            self.block_bytes += COUNT_BYTES + self._head.storage.layout.bytes_per_block

    @property
    def delay(self) -> float:
        """Seconds until a block that was computed is complete: a draft head computes its entries some steps later."""
        return HEAD_SECONDS if self._head is not None else 0.0

    @property
    def state_bytes(self) -> int:
        return self._storage.layout.bytes_per_state

    def read(self, block_id: int) -> np.ndarray:
        """u8[block bytes]: a copy."""
        own = self._storage.read_block(block_id)
        if self._head is None:
            return own
        count = np.array([self._head.filled[block_id]], np.uint32).view(np.uint8)
        return np.concatenate([own, count, self._head.storage.read_block(block_id)])

    def of_target(self, block: np.ndarray) -> np.ndarray:
        """The target's part of a block."""
        return block[: self._size]

    def write_head(self, block_id: int, block: np.ndarray) -> None:
        """Store the draft head's part of a block."""
        if self._head is not None:
            start = self._size + COUNT_BYTES
            count = int(block[self._size : start].view(np.uint32)[0])
            self._head.storage.write_block(block_id, block[start:])
            self._head.filled[block_id] = min(count, self._head.block_size)
            self._head.is_untouched = False

    def read_state(self, state: int) -> np.ndarray:
        return self._storage.read_state(state)
