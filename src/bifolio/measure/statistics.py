"""Means, spreads and percentiles of measured values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Distribution:
    """A summary of measured values, in their own unit; all 0 when there are none."""

    count: int = 0
    mean: float = 0.0
    std: float = 0.0  # of the sample (n - 1); 0 for a single value
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        if not len(values):
            return cls()
        array = np.asarray(values, dtype=np.float64)
        p50, p90, p99 = (float(value) for value in np.percentile(array, (50, 90, 99)))
        std = float(array.std(ddof=1)) if len(array) > 1 else 0.0
        return cls(len(array), float(array.mean()), std, p50, p90, p99, float(array.max()))

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def show_seconds(seconds: float) -> str:
    """Format seconds with three digits and a suitable unit."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def show_count(count: int, noun: str) -> str:
    """1 thread, 2 threads."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def show_rate(value: float, unit: str) -> str:
    """A number per second with a decimal prefix: 12.3 GB/s."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}/s"
    return f"{value:.3g} {unit}/s"
