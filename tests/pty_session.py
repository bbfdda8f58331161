"""A program in a terminal of its own: type keys, wait for text on its screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]|\x1b[=>]")


def _take_terminal() -> None:
    """Let the terminal on standard input control this process; Ctrl-C works where the tests ignore it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells ignore it in programs that they start in the background


class PtySession:
    """Runs a command on a pseudo-terminal; the output is kept raw and without escape sequences."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, width: int = 80, height: int = 30
    ) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, close_fds=True, start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", **(environment or {})},
            preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(slave)
        self.raw = ""
        self._seen = 0  # characters of the text: `expect` looks behind them

    @classmethod
    def bifolio(cls, *arguments: str, environment: Mapping[str, str] | None = None, **size: int) -> PtySession:
        return cls([sys.executable, "-m", "bifolio", *arguments], environment, **size)

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def line(self, text: str) -> None:
        self.send(text + "\r")

    def paste(self, text: str) -> None:
        """As a terminal with bracketed paste sends it."""
        self.send(f"\x1b[200~{text}\x1b[201~")

    def interrupt(self) -> None:
        self.send("\x03")

    def expect(self, text: str, timeout: float = 120.0) -> str:
        """Read until `text` is on the screen after all that was expected before; the text up to it."""
        deadline = time.monotonic() + timeout
        while True:
            found = self.text.find(text, self._seen)
            if found >= 0:
                passed, self._seen = self.text[self._seen : found], found + len(text)
                return passed
            if time.monotonic() > deadline:
                raise AssertionError(f"{text!r} did not come; the screen has:\n{self.text[-3000:]}")
            if not self._read(0.2) and self.process.poll() is not None and not self._read(0.2):
                raise AssertionError(f"the program ended before {text!r}:\n{self.text[-3000:]}")

    def listen(self, seconds: float) -> None:
        """Read all output of the next seconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._read(left)

    def wait(self, timeout: float = 60.0) -> int:
        """The exit code, once the program has ended."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.1)
        return self.process.wait(timeout=1)

    @property
    def text(self) -> str:
        return ESCAPES.sub("", self.raw)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self.master], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:  # the other end was closed
            return False
        self.raw += data.decode(errors="replace")
        return bool(data)

    def __enter__(self) -> PtySession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=10)
        os.close(self.master)
