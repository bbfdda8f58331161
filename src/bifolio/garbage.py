"""Pauses of Python's garbage collector, and objects that it alone would free."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector; objects are still freed when their last reference goes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class QuietCollector:
    """Full collections of a process that has started: soon where it is idle, now and then where it works.

    A request and its sequences refer to each other, so the collector alone frees an ended one. By itself it waits until
    a quarter of all objects is new: where few requests come, memory grows for minutes, as with a leak.
    """

    def __init__(self, idle_seconds: float = 5.0, busy_seconds: float = 30.0) -> None:
        self._idle_seconds, self._busy_seconds = idle_seconds, busy_seconds
        gc.collect()
        gc.freeze()  # later collections leave out the objects of the start, and take a few milliseconds
        self._last = time.monotonic()

    def look(self, *, is_idle: bool) -> None:
        """Collect if it is time; while the collector is paused, it is not."""
        seconds = self._idle_seconds if is_idle else self._busy_seconds
        if time.monotonic() - self._last >= seconds and gc.isenabled():
            gc.collect()
            self._last = time.monotonic()


def forget_frames(error: BaseException) -> None:
    """Release the frames in which an error was raised, with those of the errors that it came from.

    A frame that waited for a future of a failed thread refers to the error, and the error to the frame: all that its
    variables hold, such as the body of a refused request, would stay until the collector runs.
    """
    found: list[BaseException | None] = [error]
    while found:
        one = found.pop()
        if one is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            found += [one.__cause__, one.__context__]
