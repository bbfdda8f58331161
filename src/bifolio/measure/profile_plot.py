"""Plot of a profile: time by part of each phase, and a roofline of the machine's limits."""

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
POINTS = ("projections", "attention", "MLP", "logits")  # parts with enough arithmetic for a point


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
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _bar_label(phase: PhaseProfile) -> str:
    per_token = show_seconds(1.0 / phase.speed)
    return f"{phase.name}\n{phase.speed:,.0f} tokens/s\n{per_token} per token"


def _plot_roofline(axes: Any, profile: Profile) -> None:
    """Achieved Gop/s over operations per byte: bound by memory under the slope, by arithmetic under a flat part."""
    limits, points = profile.limits, _points(profile)
    roofs = [(limits.flops_per_second, "-", "limit: floats")]
    if limits.integer_ops_per_second is not None:
        roofs.append((limits.integer_ops_per_second, "--", "limit: quantised weights, in integers"))
    ridges = [roof / limits.bytes_per_second for roof, _, _ in roofs]
    low = min([x for _, _, x, _ in points] + ridges) / 4
    high = 4 * max([x for _, _, x, _ in points] + ridges)
    for (roof, style, label), ridge in zip(roofs, ridges, strict=True):
        span = np.sort(np.append(np.geomspace(low, high, 50), ridge))
        height = np.minimum(span * limits.bytes_per_second, roof) / 1e9
        axes.loglog(span, height, color="black", linewidth=2, linestyle=style, label=label)
    axes.axvline(ridges[-1], color="black", linewidth=0.8, linestyle=":")
    for phase, part, x, y in points:
        _plot_point(axes, phase, part, x, y / 1e9)
    axes.set(
        xlabel="arithmetic per byte moved (operations / byte)",
        ylabel="achieved Gop/s",
        title=_limits_title(profile),
    )
    below = {"y": axes.get_ylim()[0], "va": "bottom", "fontsize": 9, "color": "#444444"}
    axes.text(ridges[-1], s="  bound by compute →", ha="left", **below)
    axes.text(ridges[-1], s="← bound by memory  ", ha="right", **below)
    _label_decades(axes.yaxis)
    plain_axes(axes)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize=9)


def _limits_title(profile: Profile) -> str:
    """The measured limits, and how much of them each phase uses."""
    limits = profile.limits
    parts = [f"reads {show_rate(limits.bytes_per_second, 'B')}", f"floats {show_rate(limits.flops_per_second, 'FLOP')}"]
    if limits.integer_ops_per_second is not None:
        parts.append(f"integers {show_rate(limits.integer_ops_per_second, 'OP')}")
    shares = [(phase.name, phase.compute_share(limits), phase.read_share(limits)) for phase in profile.phases]
    used = [
        f"{name}: {100 * compute:.0f} % of compute, {100 * read:.0f} % of reading" for name, compute, read in shares
    ]
    return f"Against the machine ({', '.join(parts)}, measured)\n{'   ·   '.join(used)}"


def _plot_point(axes: Any, phase: str, part: str, x: float, y: float) -> None:
    if part == "all":
        style = {"color": "black", "markersize": 13, "markerfacecolor": "none", "markeredgewidth": 2}
        axes.plot(x, y, MARKERS[phase], label=f"{phase}, whole step", **style)
    else:
        axes.plot(x, y, MARKERS[phase], label=f"{phase}: {part}", color=COLOURS[part], markersize=9)


def _label_decades(axis: Any) -> None:
    """Label 1, 2, 5, 10 as plain numbers instead of powers."""
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
