"""Pauses of Python's garbage collector, and objects that it alone would free."""

from __future__ import annotations

import gc
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
