"""Progress output of a run: a live bar with rich, plain lines without."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol


class Progress(Protocol):
    """Receiver of progress and messages."""

    def message(self, text: str) -> None: ...

    def step(self, step: int, steps: int, loss: float, learning_rate: float, tokens_per_second: float) -> None: ...

    def close(self) -> None: ...


class SilentProgress:
    """No output: for processes other than the first, and for tests."""

    def message(self, text: str) -> None:
        pass

    def step(self, step: int, steps: int, loss: float, learning_rate: float, tokens_per_second: float) -> None:
        pass

    def close(self) -> None:
        pass


class PlainProgress(SilentProgress):
    """One line at intervals, suitable for log files."""

    def __init__(self, seconds_between: float = 5.0) -> None:
        self.seconds_between = seconds_between
        self._last_shown = 0.0
        self._first: tuple[int, float] | None = None  # (step, moment) of the first report

    def message(self, text: str) -> None:
        print(text, flush=True)

    def step(self, step: int, steps: int, loss: float, learning_rate: float, tokens_per_second: float) -> None:
        now = time.monotonic()
        self._first = self._first or (step, now)
        if step < steps and now - self._last_shown < self.seconds_between:
            return
        self._last_shown = now
        print(f"step {step}/{steps}  loss {loss:.4f}  rate {learning_rate:.2e}  {tokens_per_second:,.0f} tokens/s  "
              f"left {self._left(step, steps, now)}", flush=True)  # fmt: skip

    def _left(self, step: int, steps: int, now: float) -> str:
        """The remaining time at the speed so far, as h:mm:ss."""
        first, began = self._first or (step, now)
        if step == first:
            return "-:--:--"
        seconds = int((steps - step) * (now - began) / (step - first))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


class LiveProgress:
    """A progress bar with loss, speed and remaining time; messages are printed above it."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        self._bars: Any = Bars(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[facts]}"),
            TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        self._task: Any = None

    def message(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)

    def step(self, step: int, steps: int, loss: float, learning_rate: float, tokens_per_second: float) -> None:
        facts = f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
        if self._task is None:
            self._bars.start()
            self._task = self._bars.add_task("", total=steps, facts=facts)
        self._bars.update(self._task, completed=step, facts=facts)

    def close(self) -> None:
        self._bars.stop()


def make_progress(is_first: bool) -> Progress:
    """Live output on a terminal if rich is installed, else plain lines; none in other processes than the first."""
    if not is_first:
        return SilentProgress()
    if sys.stdout.isatty():
        try:
            return LiveProgress()
        except ImportError:
            pass
    return PlainProgress()
