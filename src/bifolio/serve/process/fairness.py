"""Turns: the order in which the requests of several keys run.

Every request gets a turn, a number; the engine runs small numbers first. The turns of one key follow each other, and a
key that was idle joins at the present turn: keys alternate, however many requests each of them sends. A priority moves
a request by some turns at most, so it overtakes a few requests and never starves one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")
MAX_SHIFT = 16.0  # turns that a priority of -16 or less gains, and 16 or more loses
MAX_KEYS = 4096  # whose last turn is known


class Turns:
    """Hands out turns. Lives on the engine's thread."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._now = 0.0  # the latest turn that has begun to run

    def next(self, key: str, cost: float = 1.0, priority: int = 0) -> float:
        """The turn of a new request; a request of several sequences takes as many turns of its key."""
        first = max(self._now, self._last.pop(key, 0.0))
        self._last[key] = first + cost  # the key moves to the end of the dict
        while len(self._last) > MAX_KEYS:
            del self._last[next(iter(self._last))]
        return first + max(-MAX_SHIFT, min(float(priority), MAX_SHIFT))

    def started(self, turn: float) -> None:
        """A request with this turn runs."""
        self._now = max(self._now, turn)


class FairQueue(Generic[T]):
    """Waiting items, taken in turn over the shares that they belong to."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()  # share -> its items

    def put(self, share: str, item: T) -> None:
        self._waiting.setdefault(share, deque()).append(item)

    def count(self, share: str) -> int:
        """Items of a share that wait."""
        return len(self._waiting.get(share, ()))

    def take(self) -> T | None:
        """The first item of the share whose turn it is; the share then goes to the end. None: nothing waits."""
        if not self._waiting:
            return None
        share, queue = self._waiting.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._waiting[share] = queue
        return item


class FairThread:
    """A thread that runs the work of several shares, in turn over them."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._queue: FairQueue[Callable[[], None]] = FairQueue()
        self._lock = threading.Lock()

    def submit(self, share: str, work: Callable[[], None]) -> None:
        """Queue work; RuntimeError if the system starts no further thread."""
        with self._lock:
            self._executor.submit(self._run_next)
            self._queue.put(share, work)

    def close(self) -> None:
        """Drop the work that waits; the running one ends by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            work = self._queue.take()
        if work is not None:
            work()
