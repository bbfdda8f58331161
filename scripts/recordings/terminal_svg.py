"""A recorded terminal session as an animated SVG.

The recording is an asciinema file (version 2): a header with the size, then `[seconds, "o", text]` a line. Each row of
the screen is written once for every text that it had, and is visible for as long as it had it.
"""

from __future__ import annotations

import json
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from recordings.animation import document, shown
from recordings.screen import PLAIN, Row, Screen, Style

FRAMES_PER_SECOND = 8
PAUSE = 3.0  # seconds for which the last picture stays
CELL_WIDTH, CELL_HEIGHT, MARGIN, BAR = 8.0, 18.0, 14.0, 30.0
CSS = (
    ".window{fill:#16191c}.bar{fill:#2a3034}"
    "text{font:13.3px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#dcdfe4;"
    "white-space:pre}.cursor{fill:#dcdfe4;opacity:.6}"
)


class Recording(NamedTuple):
    width: int
    height: int
    events: list[tuple[float, str]]  # seconds since the start, output


def read_cast(path: Path) -> Recording:
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    size = json.loads(header)
    events = [json.loads(line) for line in lines]
    return Recording(size["width"], size["height"], [(time, text) for time, kind, text in events if kind == "o"])


def write_cast(path: Path, recording: Recording) -> None:
    lines = [json.dumps({"version": 2, "width": recording.width, "height": recording.height})]
    lines += [json.dumps([round(time, 3), "o", text], ensure_ascii=False) for time, text in recording.events]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def frames(recording: Recording) -> list[tuple[float, tuple[Row, ...], tuple[int, int]]]:
    """(time, rows, cursor) of the pictures: the last state of the screen in each part of a second."""
    screen = Screen(recording.width, recording.height)
    found: list[tuple[float, tuple[Row, ...], tuple[int, int]]] = [(0.0, screen.rows(), screen.cursor)]
    for time, text in recording.events:
        screen.feed(text)
        slot = round(time * FRAMES_PER_SECOND) / FRAMES_PER_SECOND
        if slot == found[-1][0]:
            found.pop()
        found.append((slot, screen.rows(), screen.cursor))
    return found


def draw(recording: Recording, title: str) -> str:
    pictures = frames(recording)
    duration = pictures[-1][0] + PAUSE
    width = recording.width * CELL_WIDTH + 2 * MARGIN
    height = recording.height * CELL_HEIGHT + 2 * MARGIN + BAR
    body = [
        f'<rect class="window" width="{width:g}" height="{height:g}" rx="8"/>',
        f'<path class="bar" d="M0 {BAR:g}V8a8 8 0 0 1 8-8H{width - 8:g}a8 8 0 0 1 8 8V{BAR:g}z"/>',
        f'<text x="{MARGIN:g}" y="20">{escape(title)}</text>',
        '<g class="moving">',
        *_moving_rows(pictures, duration),
        *_moving_cursor(pictures, duration),
        "</g>",
        '<g class="still">',
        *(_row(row, y) for y, row in enumerate(pictures[-1][1]) if row),
        "</g>",
    ]
    return document(width, height, title, CSS, body)


def _moving_rows(pictures: list[tuple[float, tuple[Row, ...], tuple[int, int]]], duration: float) -> list[str]:
    elements = []
    for y in range(len(pictures[0][1])):
        changes = [(time, rows[y]) for time, rows, _ in pictures]
        kept = [changes[0], *(after for before, after in pairwise(changes) if before[1] != after[1])]
        for (start, row), (end, _) in pairwise([*kept, (duration, ())]):
            if row:
                elements.append(_row(row, y, *shown(start, end, duration)))
    return elements


def _moving_cursor(pictures: list[tuple[float, tuple[Row, ...], tuple[int, int]]], duration: float) -> list[str]:
    places = [(time, cursor) for time, _, cursor in pictures]
    kept = [places[0], *(after for before, after in pairwise(places) if before[1] != after[1])]
    size = f'width="{CELL_WIDTH:g}" height="{CELL_HEIGHT - 3:g}"'
    elements = []
    for (start, (x, y)), (end, _) in pairwise([*kept, (duration, (0, 0))]):
        hidden, animation = shown(start, end, duration)
        place = f'x="{MARGIN + x * CELL_WIDTH:g}" y="{_baseline(y) - 12:g}"'
        elements.append(f'<rect class="cursor" {place} {size}{hidden}>{animation}</rect>')
    return elements


def _baseline(y: int) -> float:
    return BAR + MARGIN + y * CELL_HEIGHT + 13


def _row(row: Row, y: int, hidden: str = "", animation: str = "") -> str:
    """A row of text; runs of one style begin at their own column, so that any monospaced font fits."""
    parts, column, backs = [], 0, []
    for text, style in row:
        x = MARGIN + column * CELL_WIDTH
        if style.back is not None:
            size = f'width="{len(text) * CELL_WIDTH:g}" height="{CELL_HEIGHT:g}"'
            backs.append(f'<rect x="{x:g}" y="{_baseline(y) - 13:g}" {size} fill="{style.back}"/>')
        if text.strip():
            length = f' textLength="{len(text) * CELL_WIDTH:g}"' if len(text) > 1 else ""
            parts.append(f'<tspan x="{x:g}"{length}{_attributes(style)}>{escape(text, quote=False)}</tspan>')
        column += len(text)
    return f'<g{hidden}>{animation}{"".join(backs)}<text y="{_baseline(y):g}">{"".join(parts)}</text></g>'


def _attributes(style: Style) -> str:
    if style == PLAIN:
        return ""
    found = {
        "fill": style.colour,
        "font-weight": "bold" if style.bold else None,
        "font-style": "italic" if style.italic else None,
        "fill-opacity": ".6" if style.dim else None,
        "text-decoration": "underline" if style.underline else None,
    }
    return "".join(f' {name}="{value}"' for name, value in found.items() if value is not None)
