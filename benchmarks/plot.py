"""The plot of results: the share of its limit that each column reaches, or its speed relative to ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import OURS, ResultRow, Results
from benchmarks.table import number
from bifolio.errors import ConfigError

COLOURS = ("#1b6ca8", "#c46210", "#5a8f29", "#7a4fa3", "#8a8a8a", "#b03a5b", "#2a9d8f", "#c9a227")
INCHES = 0.2  # height of a bar


def plot(runs: Sequence[Results], path: Path) -> None:
    """A panel for each model, with a group of bars for each row; the figures stand beside the bars."""
    from bifolio.measure.figures import new_figure

    panels = panels_of(runs)
    if not panels:
        raise ConfigError("there is nothing to draw: no row has a limit or a second column")
    names = list(dict.fromkeys(name for rows in panels.values() for row in rows for name in row.columns))
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    across = 2 if len(panels) > 2 else 1
    rows = -(-len(panels) // across)
    bars = max(sum(0.6 + len(row.columns) for row in each) for each in panels.values())
    figure = new_figure(7.5 * across, rows * (0.9 + INCHES * bars) + 0.4)
    axes = figure.subplots(rows, across, squeeze=False).ravel()
    seen: dict[str, Any] = {}
    for each, (model, own) in zip(axes, panels.items(), strict=False):
        _panel(each, model, own, colours, seen)
    for each in list(axes)[len(panels) :]:
        each.set_axis_off()
    figure.legend(seen.values(), seen.keys(), loc="outside upper center", ncols=min(len(seen), 4), frameon=False)
    figure.savefig(path, dpi=100)


def panels_of(runs: Sequence[Results]) -> dict[str, list[ResultRow]]:
    """The rows of each model: all that have a limit, or else all in which two columns can be compared."""
    found: dict[str, list[ResultRow]] = {}
    for model in dict.fromkeys(row.model for results in runs for row in results.rows):
        rows = [row for results in runs for row in results.rows if row.model == model and row.value(OURS)]
        compared = [row for row in rows if any(row.advantage(name) for name in row.columns if name != OURS)]
        limited = [row for row in rows if row.limit]
        chosen = limited if len(limited) == len(rows) else compared or limited
        if chosen:
            found[model] = chosen
    return found


def share(row: ResultRow, column: str, of_limit: bool) -> float | None:
    """Of the limit, or the speed relative to ours."""
    if of_limit:
        return row.of_limit(column)
    advantage = row.advantage(column)
    return None if not advantage else 1 / advantage


def _panel(axes: Any, model: str, rows: Sequence[ResultRow], colours: dict[str, str], seen: dict[str, Any]) -> None:
    from bifolio.measure.figures import plain_axes

    of_limit = all(row.limit for row in rows)
    place, ticks = 0.0, []
    for row in rows:
        ticks.append((place + (len(row.columns) - 1) / 2, row.title))
        for name in row.columns:
            value = share(row, name, of_limit)
            if value:
                seen.setdefault(name, axes.barh(place, 100 * value, 0.85, color=colours[name]))
                text = f"{number(row.value(name) or 0.0)} {row.unit}"
                axes.text(100 * value + 0.7, place, text, va="center", fontsize=7)
            place += 1
        place += 0.6
    axes.set_yticks([at for at, _ in ticks], [title for _, title in ticks], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("% of the limit" if of_limit else "% of the speed of bifolio", fontsize=8)
    axes.set_title(model, loc="left", fontsize=10)
    axes.margins(x=0.2)
    plain_axes(axes)
