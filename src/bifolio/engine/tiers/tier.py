"""A tier: content under keys, with a budget of bytes; the least recently used content makes room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import NamedTuple, Protocol

import numpy as np


class Key(NamedTuple):
    """Names content: a block by its digest, or the recurrent state behind that block."""

    digest: bytes
    is_state: bool = False


class Tier(Protocol):
    """`in` may be asked by any thread; `put` and `get` are called by the threads of the tiers alone."""

    def __contains__(self, key: object) -> bool: ...

    def put(self, key: Key, root: bytes, content: np.ndarray) -> None:
        """Keep u8[n] of a block whose prefix begins at `root`; a tier that cannot keep it drops it."""
        ...

    def get(self, key: Key, root: bytes, into: np.ndarray | None = None) -> np.ndarray | None:
        """The content, in `into` or elsewhere; None if it is gone, damaged, or belongs to another root."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of all content."""
        ...

    def close(self) -> None:
        """Give back memory and files; content of files stays."""
        ...


class MemoryTier:
    """Content in the memory of the host."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[Key, tuple[bytes, np.ndarray]] = OrderedDict()  # the least recently used first
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def __len__(self) -> int:
        return len(self._found)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, key: Key, root: bytes, content: np.ndarray) -> None:
        with self._lock:
            if key in self._found or content.nbytes > self._max_bytes:
                return
            self._found[key] = root, content
            self._num_bytes += content.nbytes
            while self._num_bytes > self._max_bytes:
                _, (_, oldest) = self._found.popitem(last=False)
                self._num_bytes -= oldest.nbytes

    def get(self, key: Key, root: bytes, into: np.ndarray | None = None) -> np.ndarray | None:
        with self._lock:
            found = self._found.get(key)
            if found is None or found[0] != root:
                return None
            self._found.move_to_end(key)
            return found[1]

    def close(self) -> None:
        with self._lock:
            self._found.clear()
            self._num_bytes = 0
