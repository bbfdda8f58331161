"""The operations on streams and inputs of layers, timed."""

from __future__ import annotations

from typing import Any

from bifolio.kernels.interface import Array, KernelSet, Norm
from bifolio.measure.part_clock import PartClock


class TimedStreams:
    """A part of `TimedKernels`."""

    inner: KernelSet
    clock: PartClock

    def add_scaled(self, x: Array, y: Array, scale: float) -> Array:
        return self.clock.timed("norms", self.inner.add_scaled, x, y, scale)

    def embed_known(self, table: Any, ids: Array, scale: float) -> Array:
        return self.clock.timed("embedding", self.inner.embed_known, table, ids, scale)

    def norm_groups(self, x: Array, norm: Norm) -> Array:
        return self.clock.timed("norms", self.inner.norm_groups, x, norm)

    def columns(self, x: Array, start: int, width: int, factors: Array | None = None) -> Array:
        return self.clock.timed("norms", self.inner.columns, x, start, width, factors)

    def act_gate(self, x: Array, inputs: Array, start: int, activation: str) -> Array:
        return self.clock.timed("MLP", self.inner.act_gate, x, inputs, start, activation)

    def sparse_act_mul(self, x: Array, deviations: float, activation: str) -> Array:
        return self.clock.timed("MLP", self.inner.sparse_act_mul, x, deviations, activation)

    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        return self.clock.timed("norms", self.inner.mix_streams, x, coefficients, streams)

    def correct_streams(self, x: Array, y: Array, coefficients: Array, active: int) -> Array:
        return self.clock.timed("norms", self.inner.correct_streams, x, y, coefficients, active)

    def add_to_streams(self, x: Array, y: Array, first: int) -> Array:
        return self.clock.timed("norms", self.inner.add_to_streams, x, y, first)

    def spread_streams(self, x: Array, y: Array) -> Array:
        return self.clock.timed("norms", self.inner.spread_streams, x, y)

    def merge_streams(self, x: Array, y: Array) -> Array:
        return self.clock.timed("norms", self.inner.merge_streams, x, y)
