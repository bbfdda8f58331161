"""The history of the prefix cache, for routers on other hosts: blocks that were stored, removed, or dropped together.

The block manager records events under its lock, in order, in a bounded queue; another thread takes them. When that
thread falls behind, the queue is replaced by one `Cleared`: a reader then knows of fewer blocks than are cached, never
of more.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from bifolio.cache.digests import TokenIds

MAX_EVENTS = 65_536  # that wait to be taken


class Stored(NamedTuple):
    """Consecutive full blocks of one prefix that can be found by content from now on."""

    digests: list[bytes]
    parent: bytes  # digest of the block before them; `root` for the first block of a prefix
    root: bytes  # digest of the empty prefix: carries the salt
    token_ids: TokenIds  # of all these blocks


class Removed(NamedTuple):
    """A block whose content is gone."""

    digest: bytes


class Cleared(NamedTuple):
    """All blocks are gone, or events were lost."""


CacheEvent = Stored | Removed | Cleared


class CacheEvents:
    """A bounded queue of events. One thread records, another one takes."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._max_events = max_events
        self._events: deque[CacheEvent] = deque()
        self._lock = threading.Lock()  # held for one step of a queue: the block manager never waits for a reader
        self.num_overflows = 0

    def record(self, event: CacheEvent) -> None:
        """Append an event; a full queue is replaced by `Cleared`."""
        with self._lock:
            if len(self._events) >= self._max_events:
                self._events = deque([Cleared()])
                self.num_overflows += 1
            self._events.append(event)

    def take(self) -> list[CacheEvent]:
        """Remove and return the events so far."""
        with self._lock:
            taken, self._events = self._events, deque()
        return list(taken)
