"""The clock of timed kernels: seconds, operations and bytes of each part of a step, by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


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
    wait: Callable[[], None] | None = None  # for a device, whose work is counted in the part that launched it

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
