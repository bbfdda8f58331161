"""Copies of blocks between a device's cache and host memory, for the tiers below the cache.

A block leaves or enters a device as one contiguous piece over all layers, so that one transfer moves it:

    out   cache ──pack, behind all launched work──▶ piece on the device ──own stream──▶ pinned memory
    in    pinned memory ──own stream──▶ pieces on the device ──unpack, same stream──▶ places in the cache

Only `HostRead.wait`, `finish_writes` and `upload_state` wait for the device: threads of the tiers call them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


class HostRead:
    """Content on its way to host memory; `wait` returns it, from any thread."""

    def __init__(self, nbytes: int, finish: Callable[[], np.ndarray]) -> None:
        self.nbytes = nbytes
        self._finish: Callable[[], np.ndarray] | None = finish
        self._content: np.ndarray | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, content: np.ndarray) -> HostRead:
        """Content that is in host memory."""
        return cls(content.nbytes, lambda: content)

    def wait(self) -> np.ndarray:
        """u8[nbytes]"""
        with self._lock:
            if self._content is None and self._finish is not None:
                self._content = self._finish()
                self._finish = None  # and the device memory that it holds
            assert self._content is not None
            return self._content


class BlockCopies(Protocol):
    """The copies of one storage."""

    def allocate(self, num_bytes: int) -> np.ndarray:
        """u8[num_bytes] of host memory, pinned for blocks as long as the reserve lasts."""
        ...

    def read_block(self, block_id: int) -> HostRead:
        """Queue a copy behind all launched work; MemoryError if the device has no room for the piece."""
        ...

    def read_state(self, state: int) -> HostRead:
        """As `read_block`, of a recurrent state."""
        ...

    def mark(self) -> Any:
        """The end of all work launched so far, for writes that must follow it."""
        ...

    def write_blocks(self, block_ids: Sequence[int], blocks: Sequence[np.ndarray], after: Any) -> None:
        """Queue copies into blocks that no later work reads before `finish_writes`; the caller keeps the arrays."""
        ...

    def finish_writes(self) -> None:
        """Wait until all queued blocks are in their places."""
        ...

    def upload_state(self, data: np.ndarray) -> Any:
        """A state on the device."""
        ...

    def write_state(self, state: int, uploaded: Any) -> None:
        """Queue the copy of an uploaded state to its place, behind all launched work."""
        ...
