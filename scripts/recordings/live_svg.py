"""Recorded events of `/live` as an animated SVG: the map of the cache's blocks and the slots of the batch.

The recording holds the differences between events, so that it stays small:

    {"block_size": 16, "num_blocks": 240, "num_slots": 8,
     "events": [{"time": 0.0, "blocks": {"3": [2, 1]}, "slots": [[0, "decode", 96, 96, 12, 240]]}]}

A block is its state (0 free, 1 cached, 2 + slot held) and the number of sequences that hold it; a slot is its number,
phase, computed and all tokens of the prompt, generated tokens and their limit. Colours are those of the page.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from html import escape
from itertools import pairwise
from typing import Any

from recordings.animation import Changes, document, shown

HELD = 2
CELL, GAP, COLUMNS, MARGIN = 18, 2, 40, 16
BAR, LINE = 430, 24  # the length of a slot's bar, the height of its line
FREE, CACHED = "#ebe8df", "#b9c4cb"
PAUSE = 1.5  # seconds for which the last picture stays
CSS = (
    "text{font:13px system-ui,sans-serif;fill:#596168}.heading{font-weight:600;fill:#1f2428}"
    ".holders{font-weight:bold;font-size:12px;fill:#fff;text-anchor:middle}.window{fill:#fff;stroke:#dcd9d0}"
    ".track{fill:#eceae3}.prompt{fill:#b9c4cb}"
)
Event = dict[str, Any]


def compact(events: Iterable[Event]) -> dict[str, Any]:
    """The recording of events as the server sends them."""
    found: list[Event] = []
    known: dict[int, list[int]] = {}
    first: Event = {}
    for event in events:
        first = first or event
        raw = base64.b64decode(event["blocks"])
        states = {block: [raw[2 * block], raw[2 * block + 1]] for block in range(len(raw) // 2)}
        changed = {str(block): state for block, state in states.items() if known.get(block, [0, 0]) != state}
        known = states
        fields = ("slot", "phase", "computed", "prompt", "generated", "limit")
        slots = [[slot[name] for name in fields] for slot in event["slots"]]
        found.append({"time": round(event["time"] - first["time"], 2), "blocks": changed, "slots": slots})
    shape = {"block_size": first["block_size"], "num_blocks": len(known), "num_slots": first["max_num_seqs"]}
    return {**shape, "events": found}


def draw(recording: dict[str, Any], title: str) -> str:
    rows = -(-recording["num_blocks"] // COLUMNS)
    slots_top = MARGIN + 34 + rows * CELL + 40
    width, height = COLUMNS * CELL + 2 * MARGIN, slots_top + recording["num_slots"] * LINE + MARGIN
    heading = f"KV cache: {recording['num_blocks']} blocks of {recording['block_size']} tokens"
    body = [
        f'<rect class="window" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="heading" x="{MARGIN}" y="{MARGIN + 12}">{escape(heading)}</text>',
        f'<text class="heading" x="{MARGIN}" y="{slots_top - 12}">Batch: {recording["num_slots"]} slots</text>',
        '<g class="moving">',
        *_parts(recording, slots_top, width - MARGIN),
        '</g><g class="still">',
        *_parts(_fullest(recording), slots_top, width - MARGIN),
        "</g>",
    ]
    return document(width, height, title, CSS, body)


def _parts(recording: dict[str, Any], slots_top: int, right: int) -> list[str]:
    """Counts, blocks and slots; constant where the recording has one event."""
    events = recording["events"]
    duration = events[-1]["time"] + PAUSE
    states = _states(recording)
    return [
        *_counts(states, events, duration, right),
        *(_block(block, changes, duration) for block, changes in enumerate(states)),
        *(_slot(slot, slots_top + LINE * slot, events, duration) for slot in range(recording["num_slots"])),
    ]


def _fullest(recording: dict[str, Any]) -> dict[str, Any]:
    """The moment with the most running sequences as a recording of its own."""
    events = recording["events"]
    fullest = max(range(len(events)), key=lambda number: len(events[number]["slots"]))
    blocks: dict[str, list[int]] = {}
    for event in events[: fullest + 1]:
        blocks |= event["blocks"]
    return {**recording, "events": [{"time": 0.0, "blocks": blocks, "slots": events[fullest]["slots"]}]}


def slot_colour(slot: int) -> str:
    return f"hsl({(200 + slot * 137.5) % 360:g} 55% {46 if slot % 2 else 54}%)"


def _states(recording: dict[str, Any]) -> list[list[tuple[float, tuple[int, int]]]]:
    """For each block (time, (state, holders)) of its changes."""
    found: list[list[tuple[float, tuple[int, int]]]] = [[(0.0, (0, 0))] for _ in range(recording["num_blocks"])]
    for event in recording["events"]:
        for block, (state, holders) in event["blocks"].items():
            found[int(block)].append((event["time"], (state, holders)))
    return found


def _fill(state: int) -> str:
    return FREE if state == 0 else CACHED if state == 1 else slot_colour(state - HELD)


def _block(block: int, changes: list[tuple[float, tuple[int, int]]], duration: float) -> str:
    x, y = MARGIN + block % COLUMNS * CELL, MARGIN + 30 + block // COLUMNS * CELL
    fills = Changes((time, _fill(state)) for time, (state, _) in changes)
    place = f'x="{x}" y="{y}" width="{CELL - GAP}" height="{CELL - GAP}"'
    square = f'<rect {place} fill="{fills.first}">{fills.animate("fill", duration)}</rect>'
    ends = [time for time, _ in changes[1:]] + [duration]
    numbers = [
        _text(f'class="holders" x="{x + (CELL - GAP) // 2}" y="{y + 12}"', str(holders), start, end, duration)
        for (start, (_, holders)), end in zip(changes, ends, strict=True)
        if holders > 1 and start < end
    ]
    return square + "".join(numbers)


def _text(attributes: str, text: str, start: float, end: float, duration: float) -> str:
    hidden, animation = shown(start, end, duration)
    return f"<text {attributes}{hidden}>{text}{animation}</text>"


def _counts(
    states: list[list[tuple[float, tuple[int, int]]]], events: list[Event], duration: float, right: int
) -> list[str]:
    """The numbers of blocks of each kind, at the right of the heading."""
    current = [changes[0][1] for changes in states]
    texts: list[tuple[float, str]] = []
    for event in events:
        for block, (state, holders) in event["blocks"].items():
            current[int(block)] = (state, holders)
        held = sum(state >= HELD for state, _ in current)
        shared, cached = sum(holders > 1 for _, holders in current), sum(state == 1 for state, _ in current)
        texts.append((event["time"], f"{held} held · {shared} shared · {cached} cached"))
    points = [*Changes(texts).points, (duration, "")]
    return [
        _text(f'x="{right}" y="{MARGIN + 12}" text-anchor="end"', text, start, end, duration)
        for (start, text), (end, _) in pairwise(points)
    ]


def _slot(number: int, y: int, events: list[Event], duration: float) -> str:
    """A line of the batch: colour, phase, and the bar of prompt and generated tokens."""
    found = [(event["time"], next((slot for slot in event["slots"] if slot[0] == number), None)) for event in events]
    phases = Changes((time, slot[1] if slot else "free") for time, slot in found)
    points = [*phases.points, (duration, "")]
    words = [
        _text(f'x="{MARGIN + 26}" y="{y + 13}"', phase, start, end, duration)
        for (start, phase), (end, _) in pairwise(points)
    ]

    def widths(tokens: Callable[[list[Any]], int]) -> Changes:
        return Changes(
            (time, f"{BAR * tokens(slot) / (slot[3] + slot[5]):.0f}" if slot else "0") for time, slot in found
        )

    made = widths(lambda slot: min(slot[2], slot[3]) + slot[4])
    prompt = widths(lambda slot: min(slot[2], slot[3]))
    left = MARGIN + 130

    def bar(kind: str, changes: Changes) -> str:
        size = f'x="{left}" y="{y + 4}" width="{changes.first}" height="11" rx="3"'
        return f"<rect {kind} {size}>{changes.animate('width', duration)}</rect>"

    colour = slot_colour(number)
    return "".join(
        [
            f'<rect x="{MARGIN}" y="{y + 2}" width="14" height="14" rx="3" fill="{colour}"/>',
            *words,
            f'<rect class="track" x="{left}" y="{y + 4}" width="{BAR}" height="11" rx="3"/>',
            bar(f'fill="{colour}"', made),
            bar('class="prompt"', prompt),
        ]
    )
