"""Plot of a load test: latencies, requests in flight, and throughput."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bifolio.measure.figures import new_figure, plain_axes
from bifolio.measure.load import LoadReport


def plot_load(report: LoadReport, path: Path) -> None:
    figure = new_figure(11, 7)
    axes = figure.subplots(2, 2)
    began = min((timing.started for timing in report.timings), default=0.0)
    _first_tokens(axes[0][0], report, began)
    _shares(axes[0][1], report)
    _under_way(axes[1][0], report, began)
    _speed(axes[1][1], report, began)
    for each in axes.flat:
        plain_axes(each)
    figure.suptitle(f"{report.plan_name}: {len(report.good)} of {len(report.timings)} requests")
    figure.savefig(path, dpi=120)


def _first_tokens(axes: Any, report: LoadReport, began: float) -> None:
    good = [timing for timing in report.good if timing.events]
    axes.scatter([t.started - began for t in good], [t.first_token for t in good], s=12, label="first token")
    axes.scatter([t.started - began for t in good], [t.whole for t in good], s=12, label="whole request")
    axes.set(title="waiting times by arrival", xlabel="arrival (s)", ylabel="seconds", ylim=(0, None))
    axes.legend(frameon=False)


def _shares(axes: Any, report: LoadReport) -> None:
    """Cumulative share of requests (or gaps) by duration."""
    for name, label in (("ttft", "first token"), ("itl", "between events"), ("tpot", "per token")):
        values = np.sort(report.values(name))
        if len(values):
            axes.plot(values, 100 * np.arange(1, len(values) + 1) / len(values), label=label)
    axes.set(title="share of requests within a time", xlabel="seconds", ylabel="%", xscale="log", ylim=(0, 101))
    axes.legend(frameon=False, loc="lower right")


def _under_way(axes: Any, report: LoadReport, began: float) -> None:
    moments = [(t.started - began, 1) for t in report.timings] + [(t.finished - began, -1) for t in report.timings]
    moments.sort()
    axes.step([moment for moment, _ in moments], np.cumsum([change for _, change in moments]), where="post")
    axes.set(title="requests in flight", xlabel="time (s)", ylim=(0, None))


def _speed(axes: Any, report: LoadReport, began: float) -> None:
    """Tokens per second, in half seconds or a fiftieth of the run."""
    moments: list[float] = []
    weights: list[float] = []
    for timing in report.good:
        if timing.events:
            moments += [moment - began for moment in timing.events]
            weights += [timing.num_output / len(timing.events)] * len(timing.events)
    if not moments:
        return
    width = max(0.5, report.seconds / 50)
    edges = np.arange(0, report.seconds + width, width)
    counts, _ = np.histogram(moments, edges, weights=weights)
    axes.stairs(counts / width, edges, fill=True, alpha=0.6)
    axes.set(title="output tokens per second", xlabel="time (s)", ylim=(0, None))
