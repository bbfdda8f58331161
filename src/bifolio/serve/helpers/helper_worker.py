"""A helper process: `python -m bifolio.serve.helpers.helper_worker FD`, started by `serve.helpers.helper`.

It reads the model and forks a process for each lane, which runs the tasks of that lane one after the other. The cost of
a task is decided by a stranger: the system ends the process of a lane at the limit on CPU seconds or address space, and
the next task runs in a new one, which is forked in milliseconds.

    front end ── Run, Cancel ──▶ this process ── fork ──▶ lane 0: every task, for a moment
              ◀── Outcome ──                    ── fork ──▶ lane 1: tasks that need longer
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import socket
import sys
from typing import Any

from bifolio.api.messages import FrameReader, frame
from bifolio.errors import BifolioError
from bifolio.serve.helpers import helper_messages as h
from bifolio.serve.helpers.helper_tasks import READ_BYTES, TaskRunner

OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})
SLOW_LANE_NICE = 5  # tasks of unusual cost leave most of a core to the engine and to other tasks


class Lane:
    """One forked process, and its task."""

    def __init__(self, runner: TaskRunner, number: int, selector: selectors.BaseSelector) -> None:
        self._runner = runner
        self._nice = SLOW_LANE_NICE * number
        self._selector = selector
        self._reader = FrameReader(h.result_decoder)
        self._connection: socket.socket | None = None
        self._pid = 0
        self._task = 0  # id of the task that runs
        self._is_cancelled = False

    def run(self, message: h.Run) -> None:
        """Send a task to the process; one that has died meanwhile is replaced."""
        self._task, self._is_cancelled, data = message.id, False, frame(message)
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(data)
                return
            self._end()
        self._fork().sendall(data)

    def cancel(self) -> None:
        if self._pid and self._task:
            self._is_cancelled = True
            os.kill(self._pid, signal.SIGKILL)

    def take(self) -> h.Outcome | None:
        """The outcome of the task, once the process has sent it or died; None: not yet, or there is no task."""
        if self._connection is None:
            return None
        try:
            data = self._connection.recv(READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None  # it has been replaced since the event
        except OSError:
            data = b""
        if data:
            found = self._reader.feed(data)
            result: h.Result | None = found[0] if found else None
        else:
            result = h.Failed(self._reason(self._end()))
        if result is None or not self._task:
            return None
        task, self._task = self._task, 0
        return h.Outcome(task, result)

    def _fork(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            self._serve(theirs)
        theirs.close()
        self._reader = FrameReader(h.result_decoder)
        self._connection = ours
        self._selector.register(ours, selectors.EVENT_READ, self)
        return ours

    def _serve(self, connection: socket.socket) -> None:
        """The life of the forked process."""
        status = 1
        try:
            kept = connection.fileno()
            os.closerange(3, kept)  # ends of other connections: their other ends would not see them closed
            os.closerange(kept + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
            self._runner.serve(connection, self._nice)
            status = 0
        finally:
            os._exit(status)

    def _end(self) -> int:
        """Forget the process, which has died; its status."""
        if self._connection is not None:
            self._selector.unregister(self._connection)
            self._connection.close()
            self._connection = None
        pid, self._pid = self._pid, 0
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # one that has closed its connection only
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _reason(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return h.SLOW
        return h.LOST if status <= 0 and -status in OUTSIDE | {0} and not self._is_cancelled else h.KILLED


class Forker:
    """Reads messages and results, until the other end is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = FrameReader(h.to_helper_decoder)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._lanes: list[Lane] = []

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    data = self._connection.recv(READ_BYTES)
                    if not data:
                        return
                    for message in self._reader.feed(data):
                        self._take(message)
                else:
                    self._send(key.data.take())

    def _take(self, message: Any) -> None:
        if isinstance(message, h.Prepare):
            try:
                runner = TaskRunner(message)
            except BifolioError as error:
                self._send(h.Outcome(0, h.Failed(type(error).__name__, str(error))))
                return
            self._lanes = [Lane(runner, number, self._selector) for number in range(2)]
            self._send(h.Outcome(0, h.Done()))
        elif isinstance(message, h.Run):
            self._lanes[message.lane].run(message)
        elif isinstance(message, h.Cancel):
            self._lanes[message.lane].cancel()

    def _send(self, outcome: h.Outcome | None) -> None:
        if outcome is not None:
            self._connection.sendall(frame(outcome))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # the front end is gone
        Forker(socket.socket(fileno=int(sys.argv[1]))).serve()


if __name__ == "__main__":
    main()
