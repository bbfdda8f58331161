"""The pictures of `bench throughput` and `bench latency`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.measure.figures import new_figure, plain_axes
from bifolio.measure.latency import LatencyReport
from bifolio.measure.statistics import Distribution, show_seconds
from bifolio.measure.throughput import BenchRow

PREFILL, DECODE = "#1f77b4", "#2ca02c"


def plot_throughput(rows: Sequence[BenchRow], path: Path, title: str) -> None:
    """Tokens per second of every row: bars for the means, points for the single runs; one panel for each phase."""
    phases = [
        (name, colour, [row for row in rows if bool(row.test.num_generated) == generates])
        for name, colour, generates in (("prefill", PREFILL, False), ("decode", DECODE, True))
    ]
    phases = [phase for phase in phases if phase[2]]
    figure = new_figure(9, 1.6 + 0.42 * len(rows) + 0.7 * len(phases))
    figure.suptitle(title, fontsize=12)
    panels = figure.subplots(len(phases), 1, squeeze=False, height_ratios=[len(shown) + 1 for _, _, shown in phases])
    for axes, (name, colour, shown) in zip(panels[:, 0], phases, strict=True):
        _plot_rows(axes, shown, colour)
        axes.set(title=name, xlabel="tokens per second", xlim=(0, None))
        plain_axes(axes)
    figure.savefig(path, dpi=120)


def _plot_rows(axes: Any, rows: Sequence[BenchRow], colour: str) -> None:
    means = [Distribution.of(row.speeds).mean for row in rows]
    places = np.arange(len(rows))
    axes.barh(places, means, color=colour, alpha=0.75, height=0.6)
    for place, row, mean in zip(places, rows, means, strict=True):
        axes.plot(row.speeds, [place] * len(row.speeds), "|", color="black", markersize=9)
        axes.annotate(f"{mean:,.1f}", (max(row.speeds), place), xytext=(6, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [row.test.name for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.14)


def plot_latency(report: LatencyReport, path: Path, title: str) -> None:
    """Three panels: time to the first token, between tokens, and of the whole; percentiles as lines."""
    figure = new_figure(11, 4)
    figure.suptitle(title, fontsize=12)
    parts = (
        ("time to first token", report.first_token_samples, report.first_token),
        ("between tokens", report.between_samples, report.between_tokens),
        ("whole batch", report.whole_samples, report.whole),
    )
    for axes, (name, samples, summary) in zip(figure.subplots(1, 3), parts, strict=True):
        _plot_distribution(axes, samples, summary)
        axes.set_title(f"{name}: median {show_seconds(summary.p50)}", fontsize=11)
        axes.set_xlabel("milliseconds")
        plain_axes(axes)
    figure.savefig(path, dpi=120)


def _plot_distribution(axes: Any, samples: Sequence[float], summary: Distribution) -> None:
    """The share of samples that took no longer; a few of them are points."""
    values = 1e3 * np.sort(np.asarray(samples, dtype=np.float64))
    shares = 100 * np.arange(1, len(values) + 1) / max(len(values), 1)
    axes.plot(
        values, shares, color=PREFILL, marker="o" if len(values) <= 40 else None, markersize=4, drawstyle="steps-post"
    )
    for name, value, style in (("p50", summary.p50, "-"), ("p90", summary.p90, "--"), ("p99", summary.p99, ":")):
        axes.axvline(1e3 * value, color="#777777", linestyle=style, linewidth=1, label=f"{name} {show_seconds(value)}")
    axes.set(ylabel="% took no longer", ylim=(0, 103))
    axes.legend(loc="lower right", fontsize=8, framealpha=0.9, edgecolor="none")
