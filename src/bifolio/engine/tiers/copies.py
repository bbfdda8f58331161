"""Copies out of the cache, on a thread of low priority: blocks wait under their digests until they are copied.

    stored     a block can be found by content: its digest waits
    leaves     its block is about to be overwritten: it is copied at once if it still waits, by the engine's thread
    copied     its bytes wait for the tiers

So no step waits for a tier; a copy takes as long as the bytes of one block take to be read from memory. On a GPU it is
queued on the device, and the threads wait for it. When tiers are slower than the engine and the copies take
`MAX_COPIED_BYTES`, blocks that leave are dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.engine.tiers.content import BlockContent
from bifolio.engine.tiers.tier import Key, Tier
from bifolio.kernels.block_copies import HostRead

logger = logging.getLogger(__name__)
MAX_COPIED_BYTES = 256 << 20
NICENESS = 10
MAX_WRITERS = 4  # threads that hand a device's blocks to the tiers


class Copies:
    """A `BlockKeeper` that hands blocks to the tiers. Lock order: the block manager's, then this one's."""

    def __init__(self, blocks: KVCacheBlockManager, content: BlockContent, tiers: Sequence[Tier]) -> None:
        self._blocks, self._content, self._tiers = blocks, content, tiers
        self._waiting: OrderedDict[Key, bytes] = OrderedDict()  # -> root; in the cache, not copied yet
        self._times: dict[Key, float] = {}  # when each of them may be copied
        self._copied: OrderedDict[Key, tuple[bytes, HostRead]] = OrderedDict()  # in no tier yet
        self._roots: dict[bytes, bytes] = {}  # of the blocks whose states may follow
        self._copied_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._busy: set[Key] = set()  # that threads hand to the tiers
        self._is_flushed = False  # nothing waits for its time
        self.num_stored = 0  # blocks and states that the tiers were given
        self.num_dropped = 0
        count = 1 if content.copies is None else min(MAX_WRITERS, max((os.cpu_count() or 1) // 2, 1))
        self._threads = [
            threading.Thread(target=self._run, name=f"bifolio-tiers-store-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def __contains__(self, key: object) -> bool:
        return key in self._copied or any(key in tier for tier in self._tiers)

    def get(self, key: Key, root: bytes) -> np.ndarray | None:
        """The content of a copy that no tier has yet."""
        found = self._copied.get(key)
        return found[1].wait() if found is not None and found[0] == root else None

    # -- the keeper: under the manager's lock --------------------------------------------------------------------------

    def stored(self, digests: Sequence[bytes], root: bytes) -> None:
        with self._changed:
            for digest in digests:
                self._wait(Key(digest), root)
            self._changed.notify()

    def state_stored(self, digest: bytes) -> None:
        with self._changed:
            root = self._roots.get(digest)
            if root is not None:
                self._wait(Key(digest, True), root)
                self._changed.notify()

    def leaves(self, digest: bytes, block_id: int) -> None:
        self._copy_now(Key(digest), lambda: self._content.read(block_id))
        self._roots.pop(digest, None)

    def state_leaves(self, digest: bytes, state: int) -> None:
        self._copy_now(Key(digest, True), lambda: self._content.read_state(state))

    def dropped_all(self) -> None:
        with self._changed:
            self._waiting.clear()
            self._times.clear()
            self._roots.clear()

    def _wait(self, key: Key, root: bytes) -> None:
        if not key.is_state and self._content.state_bytes:
            self._roots[key.digest] = root
        if key not in self and key not in self._waiting:
            self._waiting[key] = root
            if self._content.delay:
                self._times[key] = time.monotonic() + self._content.delay

    def _copy_now(self, key: Key, read: Callable[[], HostRead]) -> None:
        if key not in self._waiting:  # most blocks have been copied by then
            return
        with self._changed:
            root = self._waiting.pop(key, None)
            self._times.pop(key, None)
            if root is None:
                return
            if self._copied_bytes >= MAX_COPIED_BYTES:
                self.num_dropped += 1
                return
            try:
                content = read()
            except MemoryError:
                self.num_dropped += 1
                return
            self._copied[key] = root, content
            self._copied_bytes += content.nbytes
            self._changed.notify()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def flush(self, seconds: float) -> bool:
        """Wait until all is in the tiers; False after `seconds`."""
        end = time.monotonic() + seconds
        with self._changed:
            self._is_flushed = True
            self._changed.notify_all()
            while (self._waiting or self._copied or self._busy) and self._threads[0].is_alive():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.1))
        return True

    def close(self, seconds: float) -> None:
        """Write waiting content, within `seconds`, and end the thread."""
        self.flush(seconds)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(seconds)

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while self._next():
            pass

    def _next(self) -> bool:
        """Hand one copy to the tiers, or copy one block; False at the end."""
        with self._changed:
            while (key := self._due()) is None and not self._closing:
                self._changed.wait(self._content.delay or None)
            if self._closing or key is None:
                return False
            self._busy.add(key)
            found = self._copied.get(key)
        try:
            if found is None:
                found = self._copy(key)
            if found is not None:
                self._put(key, found[0], found[1].wait())
        except Exception:
            logger.exception("a block could not be kept")
        with self._changed:
            done = self._copied.pop(key, None)
            if done is not None:
                self._copied_bytes -= done[1].nbytes
            self._times.pop(key, None)
            self._busy.discard(key)
            self._changed.notify_all()
        return True

    def _due(self) -> Key | None:
        """The next content to write: a copy, or a block that may be copied."""
        every = itertools.chain(self._copied, self._waiting)
        key = next((one for one in every if one not in self._busy), None)
        if key in self._times and key not in self._copied and not self._is_flushed:
            return key if time.monotonic() >= self._times[key] else None
        return key

    def _copy(self, key: Key) -> tuple[bytes, HostRead] | None:
        """Copy a block that waits; None if it has left meanwhile."""
        with self._blocks.lock:
            with self._changed:
                root = self._waiting.pop(key, None)
            if root is None:
                return self._copied.get(key)
            place = self._blocks.cached_state(key.digest) if key.is_state else self._blocks.cached_block(key.digest)
            if place is None:
                return None
            return root, self._content.read_state(place) if key.is_state else self._content.read(place)

    def _put(self, key: Key, root: bytes, content: np.ndarray) -> None:
        for tier in self._tiers:
            tier.put(key, root, content)
        with self._changed:
            self.num_stored += 1
