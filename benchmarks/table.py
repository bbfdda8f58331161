"""Results as a table in Markdown, for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.results import OURS, ResultRow, Results


def table(results: Results, columns: Sequence[str] = (), *, passes: bool = True) -> str:
    """A line for each row: the median of each column with all passes, the share of the limit, the ratio to ours."""
    names = list(columns or results.columns())
    others = [name for name in names if name != OURS]
    heads = ["model", "row", "unit", *names, "of the limit", *(f"{OURS} / {name}" for name in others)]
    lines = [line(heads), line(["---"] * 3 + ["---:"] * (len(heads) - 3))]
    for row in results.rows:
        cells = [row.model, row.title, row.unit, *(figure(row, name, passes) for name in names)]
        cells += [percent(row.of_limit(OURS)), *(times(row.advantage(name)) for name in others)]
        lines.append(line(cells))
    return "\n".join(lines)


def line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def figure(row: ResultRow, column: str, passes: bool = True) -> str:
    """The median, and the passes in brackets."""
    cell = row.columns.get(column)
    if cell is None or not cell.passes:
        return "" if cell is None or not cell.missing else "–"
    if len(cell.passes) == 1 or not passes:
        return number(cell.value or 0.0)
    return f"{number(cell.value or 0.0)} ({'; '.join(map(number, cell.passes))})"


def number(value: float) -> str:
    """Three or four digits: 0.508, 20.8, 585, 49,655."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def heading(results: Results) -> list[str]:
    """The machine, the versions and the command of a run, as lines."""
    machine = results.machine
    parts = [str(machine.get(key)) for key in ("gpu", "cpu") if machine.get(key)]
    if machine.get("threads"):
        parts.append(f"{machine['threads']} threads")
    if machine.get("host_loops"):
        parts.append(f"{machine['host_loops']} million empty Python loops a second")
    versions = [f"{name} {value}" for name, value in results.versions.items() if isinstance(value, str)]
    return [results.title, ", ".join(parts), ", ".join([results.date, *versions]), results.command]
