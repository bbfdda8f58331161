"""The picture of a replayed trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.measure.figures import new_figure, plain_axes
from bifolio.measure.trace import TraceReport

COLOURS = ("#1f77b4", "#d62728", "#ff7f0e")


def plot_trace(reports: Sequence[TraceReport], path: Path, title: str) -> None:
    """Four panels: running and waiting requests, the cache, latencies, and progress beside the compared runs."""
    main = reports[0]
    figure = new_figure(12, 8)
    figure.suptitle(title, fontsize=13)
    panels = figure.subplots(2, 2)
    _plot_queue(panels[0][0], main)
    _plot_cache(panels[0][1], main)
    _plot_waiting(panels[1][0], reports)
    _plot_progress(panels[1][1], reports)
    for axes in panels.flat:
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
    utilisation = np.array([moment.utilisation for moment in report.moments])
    axes.fill_between(at, 100 * allocated, color="#f2b6a0", label="allocated, not filled (waste)", linewidth=0)
    axes.fill_between(at, 100 * allocated * utilisation, color=COLOURS[0], alpha=0.85, label="filled", linewidth=0)
    axes.set(
        title=f"KV cache: {100 * report.utilisation:.1f} % of allocated tokens are filled",
        xlabel="seconds",
        ylabel="% of all tokens of the cache",
        ylim=(0, 105),
    )
    axes.legend(loc="upper right")
    _plot_waste(axes.twinx(), at, 100 * (1 - utilisation))


def _plot_waste(axes: Any, at: list[float], waste: Any) -> None:
    """Waste on a scale of its own: a few percent are not visible beside the whole cache."""
    axes.plot(at, waste, color=COLOURS[1], linewidth=1, label="waste")
    axes.set_ylim(0, max(1.0, 1.25 * float(waste.max(initial=0.0))))
    axes.set_ylabel("waste, % of allocated tokens", color=COLOURS[1])
    axes.tick_params(axis="y", labelcolor=COLOURS[1])
    axes.spines["top"].set_visible(False)


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
    axes.set(title="Output tokens that were asked for", xlabel="seconds", ylabel="tokens")
    axes.legend(loc="lower right")
