"""The picture of a profile: where each phase's time goes, and how near it comes to the machine's limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bifolio.measure.figures import new_figure, plain_axes
from bifolio.measure.profiler import BOOKKEEPING, NETWORK_PARTS, PhaseProfile, Profile
from bifolio.measure.statistics import show_count, show_rate, show_seconds

COLOURS = {
    "embedding": "#404040",
    "norms": "#c7b37f",
    "projections": "#1f77b4",
    "attention": "#d62728",
    "MLP": "#2ca02c",
    "logits": "#9467bd",
    "dispatch": "#7f7f7f",
    "sampling": "#ff7f0e",
    "bookkeeping": "#17becf",
}
GROUPS = {**{name: (name,) for name in NETWORK_PARTS}, "sampling": ("sampling",), "bookkeeping": BOOKKEEPING}
MARKERS = {"prefill": "s", "decode": "o"}
POINTS = ("projections", "attention", "MLP", "logits")  # parts with arithmetic worth a point


def plot_profile(profile: Profile, path: Path) -> None:
    """Bars of shares on top, the roofline below."""
    figure = new_figure(11, 9.5)
    figure.suptitle(
        f"{profile.model} on {profile.kernels} kernels, {show_count(profile.threads, 'thread')}: {profile.batch} x "
        f"{profile.num_prompt} prompt tokens, then {profile.num_generated} generated",
        fontsize=12,
    )
    bars, roofline = figure.subplots(2, 1, height_ratios=(1, 1.7))
    _plot_shares(bars, profile)
    _plot_roofline(roofline, profile)
    figure.savefig(path, dpi=120)


def _plot_shares(axes: Any, profile: Profile) -> None:
    for row, phase in enumerate(profile.phases):
        left = 0.0
        for name, members in GROUPS.items():
            width = 100 * phase.share(*members)
            axes.barh(row, width, left=left, color=COLOURS[name], label=name if row == 0 else None, height=0.6)
            if width >= 4:
                axes.text(left + width / 2, row, f"{width:.0f} %", ha="center", va="center", color="white", fontsize=10)
            left += width
    axes.set_yticks([0, 1], [_bar_label(phase) for phase in profile.phases])
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="% of the time of a step", title="Where the time goes")
    axes.legend(ncols=len(GROUPS), loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _bar_label(phase: PhaseProfile) -> str:
    per_token = show_seconds(1.0 / phase.speed)
    return f"{phase.name}\n{phase.speed:,.0f} tokens/s\n{per_token} per token"


def _plot_roofline(axes: Any, profile: Profile) -> None:
    """Achieved GFLOP/s over FLOP per byte: under the slope reading is the limit, under the flat part arithmetic."""
    limits, points = profile.limits, _points(profile)
    roof = limits.flops_per_second / 1e9
    span = np.geomspace(
        min([x for _, _, x, _ in points] + [limits.ridge]) / 20, 4 * max(x for _, _, x, _ in points), 50
    )
    span = np.sort(np.append(span, limits.ridge))
    axes.loglog(span, np.minimum(span * limits.bytes_per_second / 1e9, roof), color="black", linewidth=2)
    if limits.integer_per_second is not None and any(phase.integer_flops for phase in profile.phases):
        integer_roof = np.minimum(span * limits.bytes_per_second / 1e9, limits.integer_per_second / 1e9)
        axes.loglog(span, integer_roof, color="black", linewidth=1.5, linestyle="--", label="limit of integers")
    axes.axvline(limits.ridge, color="black", linewidth=0.8, linestyle=":")
    for phase, part, x, y in points:
        _plot_point(axes, phase, part, x, y / 1e9)
    axes.set(
        xlabel="arithmetic per byte moved (FLOP / byte)",
        ylabel="achieved GFLOP/s",
        title=f"Against the machine: reads {show_rate(limits.bytes_per_second, 'B')}, "
        f"computes {show_rate(limits.flops_per_second, 'FLOP')} (measured)",
    )
    below = {"y": axes.get_ylim()[0], "va": "bottom", "fontsize": 9, "color": "#444444"}
    axes.text(limits.ridge, s="  bound by compute →", ha="left", **below)
    axes.text(limits.ridge, s="← bound by memory  ", ha="right", **below)
    if any(y > max(limits.flops_per_second, limits.integer_per_second or 0.0) for _, _, _, y in points):
        note = "above the line: other programs ran\nwhile the limit was measured"
        axes.text(0.99, 0.04, note, transform=axes.transAxes, ha="right", va="bottom", fontsize=9, color="#444444")
    _label_decades(axes.yaxis)
    plain_axes(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)


def _plot_point(axes: Any, phase: str, part: str, x: float, y: float) -> None:
    if part == "all":
        style = {"color": "black", "markersize": 13, "markerfacecolor": "none", "markeredgewidth": 2}
        axes.plot(x, y, MARKERS[phase], label=f"{phase}, whole step", **style)
    else:
        axes.plot(x, y, MARKERS[phase], label=f"{phase}: {part}", color=COLOURS[part], markersize=9)


def _label_decades(axis: Any) -> None:
    """1, 2, 5, 10 in plain numbers instead of powers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _points(profile: Profile) -> list[tuple[str, str, float, float]]:
    """(phase, part, FLOP per byte, FLOP/s); the whole step is called "all"."""
    points = []
    for phase in profile.phases:
        for name in POINTS:
            part = phase.parts[name]
            if part.num_bytes and part.seconds:
                points.append((phase.name, name, part.flops / part.num_bytes, part.flops / part.seconds))
        if phase.num_bytes:
            points.append((phase.name, "all", phase.flops / phase.num_bytes, phase.flops_per_second))
    return points
