"""Logs: JSON, one object a line, or lines for people on a terminal; never a prompt or an answer.

Records are queued and written by a thread of its own. When standard error is not read, the queue fills and further
records are dropped and counted: a full pipe never holds up a request.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import threading
import time
from contextvars import ContextVar
from typing import Any

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}
LEVELS = ("debug", "info", "warning", "error")
MAX_QUEUED = 4096  # records
CLOSE_SECONDS = 1.0  # that the last records get to be written


class JsonFormatter(logging.Formatter):
    """Time, level, process part, message, request id, and the fields passed as `extra`."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self._part = part

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "part": self._part,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (current := request_id.get()) is not None:
            entry["request_id"] = current
        entry |= extras(record)
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


class TerminalFormatter(logging.Formatter):
    """A line for people: time, level unless it is info, message, and the fields passed as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        fields = "".join(f"  {name}={value}" for name, value in extras(record).items() if value is not None)
        line = time.strftime("%H:%M:%S", time.localtime(record.created)) + f" {level}{record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def extras(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


class QueuedHandler(logging.Handler):
    """Writes records to a file descriptor on a thread of its own; drops them, with a count, when the queue is full."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._queue: queue.Queue[str | None] = queue.Queue(MAX_QUEUED)
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._write_all, name="bifolio-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._queue.put_nowait(self.format(record))
        except queue.Full:
            self.num_dropped += 1
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_SECONDS)
        super().close()

    def _write_all(self) -> None:
        reported = 0
        while (line := self._queue.get()) is not None:
            if self.num_dropped > reported:
                line += f"\n{self.num_dropped - reported} log records were dropped: standard error was not read"
                reported = self.num_dropped
            with contextlib.suppress(OSError):  # closed: the record is lost, and the server goes on
                data = f"{line}\n".encode("utf-8", "backslashreplace")
                while data:
                    data = data[os.write(self._descriptor, data) :]


def open_standard_streams() -> None:
    """Open the null device in the place of closed standard streams: sockets would get their numbers otherwise."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the smallest free number


def configure_logging(level: str, part: str) -> None:
    """Send the records of this process to standard error; nowhere if it is closed."""
    open_standard_streams()
    handler: logging.Handler = logging.NullHandler()
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            handler = QueuedHandler(sys.stderr.fileno())
            handler.setFormatter(TerminalFormatter() if sys.stderr.isatty() else JsonFormatter(part))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers = []
        logging.getLogger(name).propagate = True
    logging.getLogger("uvicorn.access").disabled = True  # `serve.http.app` writes a line for every request
