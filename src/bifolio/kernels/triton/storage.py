"""Keys and values on a GPU: one tensor for all layers, so that one launch moves blocks in every layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from bifolio.kernels.storage import Array, KVStorage
from bifolio.kernels.triton.cache import copy_blocks


class CudaStorage(KVStorage):
    """A `KVStorage` whose layers are views of one tensor [2 * layers, blocks, kv_heads, block_size, head_dim]."""

    _whole: Any = None
    _num_taken = 0

    def move_blocks(self, moves: Iterable[tuple[int, int]]) -> None:
        """As `KVStorage.move_blocks`; the block manager guarantees that no destination is a source."""
        pairs = np.array([(source, destination) for source, destination in moves], dtype=np.int32).reshape(-1, 2)
        if len(pairs):
            copy_blocks(self._whole, torch.from_numpy(pairs).to(self.device))

    def _allocate(self, shape: tuple[int, ...]) -> Array:
        if self._whole is None:
            self._whole = super()._allocate((2 * self.num_layers, *shape))
        self._num_taken += 1
        return self._whole[self._num_taken - 1]
