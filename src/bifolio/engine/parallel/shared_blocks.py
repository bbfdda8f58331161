"""Blocks of the cache between rank 0 and the other ranks, for transfers to and from other engines.

    shared memory   u8[size, BLOCKS, bytes]   a rank's parts of at most BLOCKS blocks; rank 0 sizes it on first use

A rank holds some of the kv heads, so its part of a block is a slice of the whole block along the heads:

    whole   |layer 0: head 0, head 1, ...|layer 1: ...|   keys of all layers, then values
    part    |layer 0: the rank's heads   |layer 1: ...|
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

BLOCKS = 8  # that are in shared memory at a time


class SharedBlocks:
    """The shared memory of one process; `file` is inherited, and closed with this object."""

    def __init__(self, file: int, size: int) -> None:
        self._file = os.fdopen(file, "r+b", buffering=0)
        self._size = size
        self._places: np.ndarray | None = None

    def fileno(self) -> int:
        return self._file.fileno()

    def places(self, part_bytes: int, *, is_first: bool = False) -> np.ndarray:
        """u8[size, BLOCKS, part_bytes], where the widest part has `part_bytes`; the first process sizes the memory."""
        if self._places is None or self._places.shape[2] != part_bytes:
            count = self._size * BLOCKS * part_bytes
            if is_first:
                os.truncate(self._file.fileno(), count)
            memory = mmap.mmap(self._file.fileno(), count)
            self._places = np.frombuffer(memory, np.uint8).reshape(self._size, BLOCKS, part_bytes)
        return self._places


def joined_blocks(parts: Sequence[np.ndarray], heads: Sequence[tuple[int, int]], num_arrays: int) -> np.ndarray:
    """u8[n, block bytes] from u8[n, part bytes] of each rank with its kv heads [start, stop).

    A head that several ranks hold has the same bytes on each. `num_arrays`: of keys and values in all layers.
    """
    count, (start, stop) = len(parts[0]), heads[0]
    row = parts[0].shape[1] // (num_arrays * (stop - start))
    whole = np.empty((count, num_arrays, max(stop for _, stop in heads), row), np.uint8)
    for part, (start, stop) in zip(parts, heads, strict=True):
        whole[:, :, start:stop] = part.reshape(count, num_arrays, stop - start, row)
    return whole.reshape(count, -1)


def split_blocks(whole: np.ndarray, heads: Sequence[tuple[int, int]], num_arrays: int) -> list[np.ndarray]:
    """u8[n, part bytes] of each rank from u8[n, block bytes]."""
    by_head = whole.reshape(len(whole), num_arrays, max(stop for _, stop in heads), -1)
    return [np.ascontiguousarray(by_head[:, :, start:stop]).reshape(len(whole), -1) for start, stop in heads]
