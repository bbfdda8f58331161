"""A line on standard error while weights are prepared, where a person watches and it takes longer than a second."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from bifolio.kernels.interface import KernelSet, Linear

PATIENCE = 1.0  # seconds before anything is shown
WIDTH = 30  # characters of the bar


class LoadProgress:
    """Counts the bytes of the matrices that a kernel set has prepared."""

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self.total = max(total, 1)
        self.done = 0
        self.shown = False
        self._stream = sys.stderr if stream is None else stream
        self._began = time.monotonic()

    def prepare(self, kernels: KernelSet, linear: Linear) -> Linear:
        """Prepare the matrices and count them."""
        prepared = kernels.prepare_linear(linear)
        self.done += sum(int(getattr(part, "nbytes", 0)) for part in linear.parts)
        if time.monotonic() - self._began > PATIENCE and self._stream.isatty():
            share = min(self.done / self.total, 1.0)
            bar = "#" * round(share * WIDTH)
            self._stream.write(f"\rloading weights [{bar:<{WIDTH}}] {share:4.0%}")
            self._stream.flush()
            self.shown = True
        return prepared

    def finish(self) -> None:
        """Clear the line."""
        if self.shown:
            self._stream.write("\r" + " " * (WIDTH + 30) + "\r")
            self._stream.flush()
