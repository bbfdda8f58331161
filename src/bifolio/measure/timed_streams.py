"""The clock of timed kernels, and the timed operations on streams and inputs of layers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bifolio.kernels.interface import Array, KernelSet, Norm


@dataclass(slots=True)
class PartTotals:
    """Totals of one part of a step."""

    seconds: float = 0.0
    flops: float = 0.0  # multiplications and additions of matrix products and attention
    num_bytes: float = 0.0  # minimum memory traffic: weights once per pass, keys and values
    integer_flops: float = 0.0  # part of `flops`: products with quantised weights, computed in integers


@dataclass(slots=True)
class PartClock:
    """Totals by phase and part; stopped while `phase` is None."""

    phase: str | None = None
    totals: dict[str, dict[str, PartTotals]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(PartTotals))
    )
    wait: Callable[[], None] | None = (
        None  # synchronises a device, so that its work is counted in the part that launched it
    )

    def timed(self, part: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run `work` and add its time to the part."""
        if self.phase is None:
            return work(*arguments)
        begin = time.perf_counter()
        result = work(*arguments)
        if self.wait is not None:
            self.wait()
        self.totals[self.phase][part].seconds += time.perf_counter() - begin
        return result

    def count(self, part: str, flops: float, num_bytes: float, integer_flops: float = 0.0) -> None:
        if self.phase is not None:
            totals = self.totals[self.phase][part]
            totals.flops += flops
            totals.num_bytes += num_bytes
            totals.integer_flops += integer_flops


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
        return self.clock.timed("streams", self.inner.columns, x, start, width, factors)

    def act_gate(self, x: Array, inputs: Array, start: int, activation: str) -> Array:
        return self.clock.timed("streams", self.inner.act_gate, x, inputs, start, activation)

    def sparse_act_mul(self, x: Array, deviations: float, activation: str) -> Array:
        return self.clock.timed("MLP", self.inner.sparse_act_mul, x, deviations, activation)

    def mix_streams(self, x: Array, coefficients: Array, streams: int) -> Array:
        return self.clock.timed("streams", self.inner.mix_streams, x, coefficients, streams)

    def correct_streams(self, x: Array, y: Array, coefficients: Array, active: int) -> Array:
        return self.clock.timed("streams", self.inner.correct_streams, x, y, coefficients, active)

    def add_to_streams(self, x: Array, y: Array, first: int) -> Array:
        return self.clock.timed("streams", self.inner.add_to_streams, x, y, first)

    def spread_streams(self, x: Array, y: Array) -> Array:
        return self.clock.timed("streams", self.inner.spread_streams, x, y)

    def merge_streams(self, x: Array, y: Array) -> Array:
        return self.clock.timed("streams", self.inner.merge_streams, x, y)
