"""The operations on streams, timed."""

from __future__ import annotations

from bifolio.kernels.interface import Array, KernelSet
from bifolio.measure.part_clock import PartClock


class TimedStreams:
    """A part of `TimedKernels`."""

    inner: KernelSet
    clock: PartClock

    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        return self.clock.timed("norms", self.inner.mix_streams, x, coefficients, streams)

    def add_to_streams(self, x: Array, y: Array, coefficients: Array | tuple[float, ...]) -> Array:
        return self.clock.timed("norms", self.inner.add_to_streams, x, y, coefficients)

    def match_streams(self, x: Array, y: Array) -> Array:
        return self.clock.timed("norms", self.inner.match_streams, x, y)
