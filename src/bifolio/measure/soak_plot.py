"""A picture of a soak test: waiting times, memory, descriptors and threads over time."""

from __future__ import annotations

from pathlib import Path

from bifolio.measure.figures import new_figure, plain_axes
from bifolio.measure.soak import SoakReport


def plot_soak(report: SoakReport, path: Path) -> None:
    """Write the picture; vertical lines are kills of the engine."""
    figure = new_figure(11, 8)
    axes = figure.subplots(3, 1, sharex=True)
    axes[0].scatter([moment for moment, _ in report.answers], [wait for _, wait in report.answers], s=6)
    axes[0].set(title="time of each exact answer", ylabel="seconds", ylim=(0, None))
    times = [sample.time for sample in report.samples]
    axes[1].plot(times, [sample.memory for sample in report.samples], label="all processes")
    for name in report.samples[-1].parts if report.samples else ():
        axes[1].plot(times, [sample.parts.get(name, 0.0) for sample in report.samples], label=name, linewidth=0.9)
    axes[1].legend(frameon=False, ncols=4, fontsize=8)
    axes[1].set(
        title="memory of the processes, mapped files aside",
        ylabel="MiB",
        ylim=(0, None),
    )
    axes[2].plot(times, [sample.descriptors for sample in report.samples], label="file descriptors")
    axes[2].plot(times, [sample.threads for sample in report.samples], label="threads")
    axes[2].set(xlabel="time (s)", ylim=(0, None))
    axes[2].legend(frameon=False)
    for each in axes:
        plain_axes(each)
        for moment in report.kills:
            each.axvline(moment, color="0.6", linewidth=0.8)
    verdict = "passed" if not report.problems else "; ".join(report.problems)
    figure.suptitle(
        f"{len(report.answers)} answers, {len(report.wrong)} wrong, {report.lost} lost to kills: {verdict}"[:120]
    )
    figure.savefig(path, dpi=120)
