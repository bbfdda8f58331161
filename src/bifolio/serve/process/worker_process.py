"""The command of an engine process, and one that is started before its supervisor is imported.

The imports of the two take about as long: a server whose engine process begins first is ready earlier.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

GENTLE = 10  # niceness: about a tenth of the share of a session at 0
GENTLE_SECONDS = 8.0  # a machine that is busy with other things would else hold up a start for long


def default_command() -> list[str]:
    """This interpreter, with its own flags (such as -O)."""
    return [sys.executable, *subprocess._args_from_interpreter_flags(), "-m", "bifolio.serve.process.worker"]  # type: ignore[attr-defined]


def give_way(pid: int, gives: bool) -> None:
    """Let the other sessions of the machine go first, or no more.

    Linux shares processors among sessions, and an engine process is one of its own. Other systems, and containers with
    shares of their own, know no such group: there a start has its usual share.
    """
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(GENTLE if gives else 0), encoding="ascii")


class StartedWorker:
    """A running engine process that waits for its launch message; it ends when `connection` is closed."""

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self.connection, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*(command or default_command()), str(theirs.fileno())], pass_fds=[theirs.fileno()],
                start_new_session=True, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)
