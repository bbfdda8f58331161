"""Plot of a replayed trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.measure.figures import new_figure, plain_axes
from bifolio.measure.trace import TraceReport

COLOURS = ("#1f77b4", "#d62728", "#ff7f0e")


def plot_trace(reports: Sequence[TraceReport], path: Path, title: str) -> None:
    """Five panels: requests, the cache, KV waste on its own scale, latencies, and progress of all compared runs."""
    main = reports[0]
    figure = new_figure(12, 8)
    figure.suptitle(title, fontsize=13)
    grid = figure.add_gridspec(4, 2)
    panels = [figure.add_subplot(place) for place in (grid[:2, 0], grid[0, 1], grid[1, 1], grid[2:, 0], grid[2:, 1])]
    panels[2].sharex(panels[1])
    _plot_queue(panels[0], main)
    _plot_cache(panels[1], main)
    _plot_waste(panels[2], reports)
    _plot_waiting(panels[3], reports)
    _plot_progress(panels[4], reports)
    for axes in panels:
        plain_axes(axes)
    figure.savefig(path, dpi=120)


def _plot_queue(axes: Any, report: TraceReport) -> None:
    at = [moment.at for moment in report.moments]
    axes.plot(at, [moment.num_waiting for moment in report.moments], color="#999999", label="waiting")
    axes.plot(at, [moment.num_running for moment in report.moments], color=COLOURS[0], label="running")
    axes.set(title=f"Requests ({report.num_preemptions} preemptions)", xlabel="seconds", ylabel="requests")
    axes.legend()


def _plot_cache(axes: Any, report: TraceReport) -> None:
    at = [moment.at for moment in report.moments]
    allocated = np.array([moment.num_used_blocks for moment in report.moments]) / max(report.num_blocks, 1)
    axes.fill_between(at, 100 * allocated, color=COLOURS[0], alpha=0.85, linewidth=0)
    title = f"KV cache: {100 * report.utilisation:.1f} % of allocated token places are filled"
    axes.set(title=title, ylabel="% of blocks\nallocated", ylim=(0, 105))


def _plot_waste(axes: Any, reports: Sequence[TraceReport]) -> None:
    """Token places that are allocated and not filled, as a share of the allocated; the others' means are lines.

    The scale ends just above the waste that 99 % of the time stays below: a few steps at the end may waste all.
    """
    main = reports[0]
    moments = [moment for moment in main.moments if moment.num_used_blocks]
    at = np.array([moment.at for moment in moments])
    waste = 100 * (1 - np.array([moment.utilisation for moment in moments]))
    axes.fill_between(
        at, waste, color="#e9a28a", linewidth=0, label=f"{main.name}: {_mean_waste(main):.1f} % on average"
    )
    means = [_mean_waste(report) for report in reports]
    for index, (report, mean) in enumerate(zip(reports, means, strict=True)):
        if index:
            note = ", padding counted as filled" if "padded" in report.name else ""
            label = f"{report.name}: {mean:.1f} %{note}"
            axes.axhline(mean, color=COLOURS[index % len(COLOURS)], linestyle="--", linewidth=1.2, label=label)
    highest = max([*means, _usual_maximum(waste, [moment.seconds for moment in moments])])
    axes.set(xlabel="seconds", ylabel="waste: % of\nallocated", ylim=(0, min(105.0, 1.6 * highest + 0.5)))
    axes.legend(loc="upper right", fontsize=8)


def _mean_waste(report: TraceReport) -> float:
    return 100 * (1 - report.utilisation)


def _usual_maximum(values: np.ndarray, seconds: Sequence[float]) -> float:
    """The value that 99 % of the time stays below."""
    if not len(values):
        return 0.0
    order = np.argsort(values)
    passed = np.cumsum(np.asarray(seconds)[order])
    return float(values[order][min(int(np.searchsorted(passed, 0.99 * passed[-1])), len(values) - 1)])


def _plot_waiting(axes: Any, reports: Sequence[TraceReport]) -> None:
    names = ("p50", "p90", "p99")
    width = 0.8 / len(reports)
    for index, report in enumerate(reports):
        values = [getattr(report.first_token, name) for name in names]
        values += [getattr(report.between_tokens, name) for name in names]
        places = np.array([0, 1, 2, 3.5, 4.5, 5.5]) + (index - (len(reports) - 1) / 2) * width
        axes.bar(places, values, width, color=COLOURS[index % len(COLOURS)], label=report.name)
    axes.set_xticks([0, 1, 2, 3.5, 4.5, 5.5], [*names, *names])
    axes.set_yscale("log")
    axes.set(title="Time to first token (left), between tokens (right)", ylabel="seconds (log)")
    axes.legend()


def _plot_progress(axes: Any, reports: Sequence[TraceReport]) -> None:
    for index, report in enumerate(reports):
        at = np.array([moment.at for moment in report.moments])
        produced = np.array([moment.num_output_tokens for moment in report.moments], dtype=float)
        useful = produced * report.num_output_tokens / max(produced[-1], 1)  # padding spread over the run
        label = f"{report.name}: {report.output_speed:.0f} tokens/s"
        axes.plot(at, useful, color=COLOURS[index % len(COLOURS)], label=label)
    axes.set(title="Requested output tokens", xlabel="seconds", ylabel="tokens")
    axes.legend(loc="lower right")
