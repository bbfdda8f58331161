"""Turns: the order in which the requests of several keys run.

Every request gets a turn, a number; the engine runs small numbers first. The turns of one key follow each other, and a
key that was idle joins at the present turn: keys alternate, however many requests each of them sends. A priority moves
a request by some turns at most, so it overtakes a few requests and never starves one.
"""

from __future__ import annotations

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
