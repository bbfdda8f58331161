"""Bars with the time left, on standard error and only if it is a terminal. rich is imported when a bar is shown."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Report = Callable[[int, int], None]  # (done, total)
PATIENCE = 1.0  # seconds of work before a bar appears


class LateBar:
    """A bar that appears when the work takes longer than `PATIENCE`."""

    def __init__(self, title: str, in_bytes: bool) -> None:
        self._title = title
        self._in_bytes = in_bytes
        self._began: float | None = None  # at the first report
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._began = self._began or time.monotonic()
            if done >= total or time.monotonic() - self._began < PATIENCE or not sys.stderr.isatty():
                return
            self._start(total)
        self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _start(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        details = (DownloadColumn(), TransferSpeedColumn()) if self._in_bytes else (TaskProgressColumn(),)
        columns = (TextColumn("{task.description}"), BarColumn(), *details, TimeRemainingColumn(), TextColumn("left"))
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self._title, total=total)
        self._bar.start()


@contextmanager
def bytes_bar(title: str) -> Iterator[Report]:
    """A bar over bytes, with speed and time left."""
    bar = LateBar(title, in_bytes=True)
    try:
        yield bar
    finally:
        bar.close()


@contextmanager
def steps_bar(title: str) -> Iterator[Report]:
    """A bar over steps of any kind, with the time left."""
    bar = LateBar(title, in_bytes=False)
    try:
        yield bar
    finally:
        bar.close()
