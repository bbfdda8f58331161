"""Loops: an output that repeats the same tokens without an end."""

from __future__ import annotations

from collections import deque

LONGEST_PERIOD = 128  # tokens that a loop repeats
LEAST_REPEATS = 3  # of the period, after its first occurrence
LEAST_TOKENS = 128  # repeated ones: a short refrain or a row of a table is no loop


class LoopWatch:
    """Tells from the tokens of one output, in their order, when it has become a loop.

    |<-- text -->|<- period ->|<- repeats of the period: at least three, and 128 tokens ->|
    """

    def __init__(self) -> None:
        self._last: deque[int] = deque(maxlen=LONGEST_PERIOD)  # the latest first
        self._equal = [0] * LONGEST_PERIOD  # newest tokens in a row that equal the token `index + 1` before them

    def add(self, token: int) -> bool:
        """Whether the output is a loop, with this token as its newest one."""
        for at, earlier in enumerate(self._last):
            self._equal[at] = self._equal[at] + 1 if earlier == token else 0
        self._last.appendleft(token)
        return any(
            count >= max(LEAST_TOKENS, LEAST_REPEATS * (at + 1)) for at, count in enumerate(self._equal) if count
        )
