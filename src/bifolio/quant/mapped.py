"""Arrays that are views of a read-only map of a file."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np


def mapping_of(array: np.ndarray) -> mmap.mmap | None:
    """The map of a file that a contiguous, read-only array is a view of."""
    owner: Any = array
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    is_view = isinstance(owner, mmap.mmap) and not array.flags.writeable and array.flags.c_contiguous
    return owner if is_view else None


def release_pages(array: np.ndarray) -> None:
    """Drop the whole pages of a view of a file from the memory of this process; they are read again when touched."""
    mapping = mapping_of(array)
    if mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = np.frombuffer(mapping, np.uint8).ctypes.data
    begin = array.ctypes.data - first
    start = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (begin + array.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        mapping.madvise(mmap.MADV_DONTNEED, start, length)
