"""Measurements as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bifolio.measure.statistics import Distribution, show_count, show_rate, show_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from bifolio.measure.latency import LatencyReport
    from bifolio.measure.profiler import PhaseProfile, Profile
    from bifolio.measure.throughput import BenchRow
    from bifolio.measure.trace import TraceReport


def new_table(title: str, *columns: str) -> Table:
    """A table whose first column is a name and whose other columns are numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    return table


def throughput_table(title: str, rows: Sequence[BenchRow]) -> Table:
    table = new_table(title, "test", "tokens/s", "±")
    for row in rows:
        summary = Distribution.of(row.speeds)
        table.add_row(row.test.name, f"{summary.mean:.2f}", f"{summary.std:.2f}")
    return table


def latency_table(title: str, report: LatencyReport) -> Table:
    table = new_table(title, "time", "mean", "±", "p50", "p90", "p99", "max")
    for name, value in (
        ("whole batch", report.whole),
        ("first token", report.first_token),
        ("between tokens", report.between_tokens),
    ):
        times = (value.mean, value.std, value.p50, value.p90, value.p99, value.max)
        table.add_row(name, *(show_seconds(seconds) for seconds in times))
    return table


def trace_table(title: str, reports: Sequence[TraceReport]) -> Table:
    table = new_table(title, "", *(report.name for report in reports))

    def line(name: str, values: Sequence[str]) -> None:
        table.add_row(name, *values)

    line("duration", [show_seconds(r.seconds) for r in reports])
    line("CPU time", [show_seconds(r.cpu_seconds) for r in reports])
    line("output tokens/s", [f"{r.output_speed:.1f}" for r in reports])
    line("all tokens/s", [f"{r.total_speed:.1f}" for r in reports])
    line("requests/s", [f"{r.num_requests / r.seconds:.2f}" for r in reports])
    for name, field in (("first token", "first_token"), ("between tokens", "between_tokens")):
        for mark in ("mean", "p50", "p90", "p99"):
            line(f"{name} {mark}", [show_seconds(getattr(getattr(r, field), mark)) for r in reports])
    line("KV slots filled", [f"{100 * r.utilisation:.2f} %" for r in reports])
    line("KV waste", [f"{100 * (1 - r.utilisation):.2f} %" for r in reports])
    line("blocks allocated", [f"{100 * r.occupancy:.1f} % of {r.num_blocks}" for r in reports])
    line("running, mean / peak", [f"{r.mean_running:.1f} / {r.peak_running}" for r in reports])
    line("preemptions", [str(r.num_preemptions) for r in reports])
    line("prompt tokens computed", [f"{r.num_computed_prompt_tokens} of {r.num_prompt_tokens}" for r in reports])
    line("prompt tokens cached", [str(r.num_cached_tokens) for r in reports])
    line("steps", [str(len(r.moments)) for r in reports])
    return table


def phase_table(phase: PhaseProfile) -> Table:
    heading = f"{phase.name}: {phase.num_tokens} tokens in {show_count(phase.num_steps, 'step')}"
    table = new_table(heading, "part", "per token", "%", "FLOP/s", "bytes/s")
    for name in phase.parts:
        table.add_row(name, *_part_cells(phase, name))
    table.add_section()
    table.add_row("all", *_sum_cells(phase))
    return table


def _part_cells(phase: PhaseProfile, name: str) -> list[str]:
    part = phase.parts[name]
    share = f"{100 * phase.share(name):.1f}"
    return _cells(phase, part.seconds, share, part.flops, part.num_bytes)


def _sum_cells(phase: PhaseProfile) -> list[str]:
    return _cells(phase, phase.seconds, "100", phase.flops, phase.num_bytes)


def _cells(phase: PhaseProfile, seconds: float, share: str, flops: float, num_bytes: float) -> list[str]:
    """Time per token, share, and the rates of parts with counted work."""
    done = show_rate(flops / seconds, "FLOP") if flops and seconds else ""
    moved = show_rate(num_bytes / seconds, "B") if num_bytes and seconds else ""
    return [show_seconds(seconds / phase.num_tokens), share, done, moved]


def limits_table(profile: Profile) -> Table:
    limits = profile.limits
    table = new_table("as it runs", "", "tokens/s", "FLOP/s", "of limit", "bytes/s", "of limit")
    for phase in profile.phases:
        table.add_row(
            phase.name,
            f"{phase.speed:.1f}",
            show_rate(phase.flops_per_second, "FLOP"),
            f"{100 * phase.compute_share(limits):.1f} %",
            show_rate(phase.bytes_per_second, "B"),
            f"{100 * phase.read_share(limits):.1f} %",
        )
    table.add_row(
        "machine",
        "",
        show_rate(limits.flops_per_second, "FLOP"),
        "",
        show_rate(limits.bytes_per_second, "B"),
        "",
    )
    if limits.integer_ops_per_second is not None:
        table.add_row("machine, quantised", "", show_rate(limits.integer_ops_per_second, "OP"), "", "", "")
    return table
