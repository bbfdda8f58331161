"""The measured costs of a prefix: seconds to compute it, and seconds to read it from a tier."""

from __future__ import annotations

WEIGHT = 0.1  # of a new measurement
LEAST_TOKENS = 16  # of a step that measures the speed of prompts


class Costs:
    """Moving averages; nothing measured yet: a tier is taken to be faster."""

    def __init__(self) -> None:
        self._seconds_per_token = 0.0  # computed
        self._seconds_per_byte = 0.0  # read

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Record the prompt tokens that a step computed, and its time."""
        if num_tokens >= LEAST_TOKENS:
            self._seconds_per_token = _moved(self._seconds_per_token, seconds / num_tokens)

    def read(self, num_bytes: int, seconds: float) -> None:
        """Record the bytes that a tier returned, and the time of the read."""
        if num_bytes:
            self._seconds_per_byte = _moved(self._seconds_per_byte, seconds / num_bytes)

    def prefers_tier(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether reading is expected to take less time than computing."""
        computed, read = self._seconds_per_token * num_tokens, self._seconds_per_byte * num_bytes
        if not computed or read <= computed:
            return True
        self._seconds_per_byte *= 1 - WEIGHT  # tries again after a while: a slow disk may have been busy
        return False


def _moved(average: float, value: float) -> float:
    return value if not average else average + WEIGHT * (value - average)
