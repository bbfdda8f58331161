"""Markdown on a terminal while it is being generated.

A paragraph, list or code block that is complete is printed once, rendered and wrapped at words. The block in progress
and a status line below it are redrawn at most REFRESH times a second, so that rendering does not slow generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import ConsoleOptions, RenderResult

REFRESH = 12  # per second
FENCES = ("```", "~~~")


class MarkdownStream:
    """Text in, rendered blocks out; `close` prints the rest."""

    def __init__(self, console: Console, status: Callable[[], str] = lambda: "") -> None:
        self._console = console
        self._status = status
        self._text = ""  # of the block in progress, and nothing before it
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0
        self._live.start()

    def write(self, text: str) -> None:
        self._text += text
        end = complete_until(self._text)
        if end:
            self._print(self._text[:end])
            self._text = self._text[end:]
        if time.monotonic() - self._drawn >= 1 / REFRESH:
            self._drawn = time.monotonic()
            self._live.update(Group(LastLines(self._text), Text(self._status(), style="dim")), refresh=True)

    def close(self) -> None:
        self._live.update(Text(""))
        self._live.stop()
        self._print(self._text)
        self._text = ""

    def _print(self, text: str) -> None:
        if text.strip():
            self._console.print(Markdown(text.strip("\n")))


class LastLines:
    """Markdown cut to the lines that fit on the screen, the last ones: a terminal cannot redraw scrolled lines."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(Markdown(self._text), options, pad=False)
        for line in lines[-max(console.height - 3, 1) :]:
            yield from line
            yield Segment.line()


def complete_until(text: str) -> int:
    """The end of the last complete block: a blank line outside code fences, or the end of a fence."""
    end, position, fence = 0, 0, ""
    for line in text.splitlines(keepends=True):
        position += len(line)
        if not line.endswith("\n"):
            break
        mark = line.lstrip()[:3]
        if fence:
            if mark == fence and not line.strip().strip(fence[0]):
                fence, end = "", position
        elif mark in FENCES:
            fence = mark
        elif not line.strip():
            end = position
    return end
