"""The pace of updates from an engine to its front ends: an event for each token where there are few streams.

Every event takes a front end some tens of microseconds. With many streams tokens travel in twos, threes and so on.
"""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.kernels.interface import KernelSet

UPDATES = 2000.0  # a second, of all streams together
UPDATES_BESIDE_KERNELS = 400.0  # where front ends and kernels share the cores
MAX_SECONDS = 0.1  # a stream is never silent for longer because of others


@dataclass(slots=True)
class UpdatePace:
    """Decides after each step whether the new tokens are sent."""

    per_second: float
    _last: float = 0.0

    @classmethod
    def of(cls, kernels: KernelSet, per_second: float | None) -> UpdatePace:
        """`per_second`: None for the default of the device."""
        if per_second is not None:
            return cls(per_second)
        return cls(UPDATES if kernels.launches_ahead else UPDATES_BESIDE_KERNELS)

    def is_due(self, now: float, num_streams: int) -> bool:
        """Whether to send now; then the next interval begins."""
        if now - self._last < min(num_streams / self.per_second, MAX_SECONDS):
            return False
        self._last = now
        return True
