"""Exchanges of tensor parallelism between processes of one host, through shared memory (`native/ranks.cpp`).

The memory is an anonymous file that the processes inherit, so that none of it outlives them:

    |signals and parts of exchanges (`_native.rank_memory_bytes`)|bytes of commands|

Results do not depend on timing: gathered columns have fixed places, and sums are added in the order of the ranks.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any

import numpy as np

from bifolio.kernels.interface import Array
from bifolio.kernels.native.library import library

MAX_RANKS = 64


class SharedMemoryRanks:
    """This process among the ranks; the signals also carry commands (`engine.parallel`)."""

    def __init__(self, file: int, rank: int, size: int, command_bytes: int) -> None:
        """`file`: descriptor from `new_memory`, of the same sizes on all ranks."""
        module = library()
        first = int(module.rank_memory_bytes(size))
        self.rank, self.size = rank, size
        self._map = mmap.mmap(file, first + command_bytes)
        memory = np.frombuffer(self._map, np.uint8)
        self.native: Any = module.Ranks(memory[:first], rank, size)
        self.commands = memory[first:]  # u8[command_bytes]  written by rank 0

    def all_gather(self, x: Array, widths: tuple[int, ...]) -> Array:
        out = np.empty((len(x), sum(widths)), np.float32)
        self.native.gather(np.ascontiguousarray(x, np.float32), list(widths), out)
        return out

    def all_reduce(self, x: Array) -> Array:
        total = np.array(x, np.float32, order="C")
        self.native.reduce(total)
        return total


def new_memory(size: int, command_bytes: int) -> int:
    """Descriptor of zeroed memory for `size` ranks, for child processes to inherit. Pages are allocated when used."""
    file = anonymous_file()
    os.truncate(file, int(library().rank_memory_bytes(size)) + command_bytes)
    return file


def anonymous_file() -> int:
    """Descriptor of an empty file in memory, which ends with the processes that have it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("bifolio-ranks")
    with tempfile.TemporaryFile() as temporary:
        return os.dup(temporary.fileno())
