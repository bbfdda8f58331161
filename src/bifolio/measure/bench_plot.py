"""Pictures of `bench throughput` and `bench latency`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bifolio.measure.figures import new_figure, plain_axes
from bifolio.measure.latency import LatencyReport
from bifolio.measure.statistics import Distribution, show_seconds
from bifolio.measure.throughput import BenchRow

PROMPT_COLOUR, TOKEN_COLOUR = "#1f77b4", "#ff7f0e"
MARKS = ("p50", "p90", "p99", "max")


def plot_throughput(rows: Sequence[BenchRow], path: Path, title: str) -> None:
    """One bar for each row, with its standard deviation; prompts and generation in two panels with own scales."""
    kinds = [
        ("prompt tokens per second", PROMPT_COLOUR, [row for row in rows if not row.test.num_generated]),
        ("generated tokens per second", TOKEN_COLOUR, [row for row in rows if row.test.num_generated]),
    ]
    kinds = [kind for kind in kinds if kind[2]]
    figure = new_figure(10, 1.2 + 0.55 * len(rows) + 0.8 * len(kinds))
    figure.suptitle(title, fontsize=11)
    panels = figure.subplots(len(kinds), 1, squeeze=False, height_ratios=[len(kind[2]) + 0.5 for kind in kinds])
    for axes, (label, colour, members) in zip(panels[:, 0], kinds, strict=True):
        speeds = [Distribution.of(row.speeds) for row in members]
        names = [row.test.name for row in members]
        axes.barh(names, [s.mean for s in speeds], xerr=[s.std for s in speeds], color=colour, height=0.6)
        for place, speed in enumerate(speeds):
            axes.text(speed.mean + speed.std, place, f"  {speed.mean:,.1f}", va="center", fontsize=9)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set(xlabel=label, xlim=(0, None))
        plain_axes(axes)
    figure.savefig(path, dpi=120)


def plot_latency(report: LatencyReport, path: Path, title: str) -> None:
    """Quantiles of the three latencies, each in a panel of its own scale."""
    figure = new_figure(11, 4.2)
    figure.suptitle(title, fontsize=11)
    values = {"first token": report.first_token, "between tokens": report.between_tokens, "whole batch": report.whole}
    for axes, (name, latency) in zip(figure.subplots(1, len(values)), values.items(), strict=True):
        milliseconds = [1000 * getattr(latency, mark) for mark in MARKS]
        axes.bar(MARKS, milliseconds, color=TOKEN_COLOUR if name == "between tokens" else PROMPT_COLOUR, width=0.6)
        for place, value in enumerate(milliseconds):
            axes.text(place, value, show_seconds(value / 1000), ha="center", va="bottom", fontsize=9)
        axes.set(title=name, ylabel="milliseconds", ylim=(0, 1.15 * max(milliseconds) or 1.0))
        plain_axes(axes)
    figure.savefig(path, dpi=120)
