"""The table of simulated fleets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.fleet.simulation import FleetReport
from bifolio.measure.statistics import show_seconds
from bifolio.measure.tables import new_table

if TYPE_CHECKING:
    from rich.table import Table


def fleet_table(title: str, reports: Sequence[FleetReport]) -> Table:
    table = new_table(title, "fleet", "hits", "good/s", "good", "TTFT p50", "p99", "TPOT p50", "p99")
    for one in reports:
        first, pace = one.first_token, one.per_token
        times = (first.p50, first.p99, pace.p50, pace.p99)
        table.add_row(
            one.name, f"{one.hit_rate:.3f}", f"{one.goodput:.2f}", f"{one.good_share:.0%}",
            *(show_seconds(seconds) for seconds in times),
        )  # fmt: skip
    return table
