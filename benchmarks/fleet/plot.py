"""Plot of simulated fleets: hit rate, waiting times and goodput by fleet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet.simulation import FleetReport
from bifolio.measure.figures import new_figure, plain_axes


def plot_fleets(reports: Sequence[FleetReport], path: Path, title: str) -> None:
    figure = new_figure(11, 7)
    axes = figure.subplots(2, 2)
    names = [report.name for report in reports]
    _bars(axes[0][0], names, [report.hit_rate for report in reports], "prompt tokens found in a cache")
    _bars(axes[0][1], names, [report.goodput for report in reports], "requests per second within the limits")
    _waits(axes[1][0], reports)
    _bars(axes[1][1], names, [1e3 * report.per_token.p99 for report in reports], "time per output token, p99 (ms)")
    for each in axes.flat:
        plain_axes(each)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, names: list[str], values: list[float], title: str) -> None:
    axes.barh(range(len(names)), values)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(title=title, xlim=(0, None))
    for row, value in enumerate(values):
        axes.text(value, row, f" {value:.3g}", va="center")


def _waits(axes: Any, reports: Sequence[FleetReport]) -> None:
    """Cumulative share of requests by the time to their first token."""
    for report in reports:
        values = np.sort(report.first_tokens)
        axes.plot(values, 100 * np.arange(1, len(values) + 1) / len(values), label=report.name)
    axes.set(
        title="share of requests by time to first token", xlabel="seconds", ylabel="%", xscale="log", ylim=(0, 101)
    )
    axes.legend(frameon=False, fontsize="small")
