"""The thread that owns an engine. Other threads queue functions, which it runs between two steps."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from bifolio.engine.engine import InferenceEngine
from bifolio.errors import EngineDeadError
from bifolio.sequence import StepResult
from bifolio.text.tokenizer import is_library_error

logger = logging.getLogger(__name__)
T = TypeVar("T")
Command = tuple[Callable[[InferenceEngine], Any], "Future[Any] | None"]


class EngineThread:
    """Runs `commands, step, commands, step, ...` while there is work, and blocks on the queue when idle.

    `on_results` is called on this thread with the results of every step. It must not block.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        on_results: Callable[[list[StepResult]], None],
        on_closed: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        self.failure: BaseException | None = None  # the error that ended the thread
        self.step_started: float | None = None  # `time.monotonic` of the running step or command, for watchdogs
        self._on_results = on_results
        self._on_closed = on_closed
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self.is_paused = False  # requests wait; commands run
        self._stopping = False
        self._closing = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    # -- from any thread -------------------------------------------------------------------------------------------
    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name="bifolio-engine", daemon=True)
        self._thread.start()

    def call(self, function: Callable[[InferenceEngine], T]) -> Future[T]:
        """Run `function(engine)` between two steps; the future holds its result or exception."""
        future: Future[T] = Future()
        with self._closing:
            if self._closed:
                future.set_exception(self._dead())
            else:
                self._commands.put((function, future))
        return future

    def post(self, function: Callable[[InferenceEngine], Any]) -> None:
        """`call` without a result. A command that fails is logged, and the engine continues."""
        self._commands.put((function, None))

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after the running step; unfinished requests are aborted."""
        self._stopping = True
        self._commands.put((lambda engine: None, None))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        return not self._closed

    # -- on the engine's thread --------------------------------------------------------------------------------------
    def run(self) -> None:
        """Run the loop; call it directly to use the current thread."""
        try:
            while not self._stopping:
                self._run_commands()
                if self._stopping:
                    break
                self._step()
            self._drain()
        except BaseException as error:
            self.failure = error
            logger.critical("the engine stopped: %r", error, exc_info=error)
        finally:
            self._close()

    def _step(self) -> None:
        if self.engine.has_work and not self.is_paused:
            self.step_started = time.monotonic()
            results = self.engine.step()
            self.step_started = None
            self._on_results(results)

    def deliver(self) -> None:
        """On the engine's thread: one step, whose results are delivered although it may be paused."""
        self._on_results(self.engine.step())

    def _drain(self) -> None:
        self.engine.abort_all()
        while self.engine.has_work:
            self._on_results(self.engine.step())

    def _run_commands(self) -> None:
        """Run all queued commands; when idle, wait for the next one."""
        idle = self.is_paused or not self.engine.has_work
        try:
            command = self._commands.get(block=idle)
            while True:
                self._run_command(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            pass

    def _run_command(self, command: Command) -> None:
        function, future = command
        if future is not None and not future.set_running_or_notify_cancel():
            return
        self.step_started = time.monotonic()
        try:
            result = function(self.engine)
        except BaseException as error:
            if not is_library_error(error):
                raise
            if future is None:
                logger.exception("a command for the engine failed")
            else:
                future.set_exception(error)
        else:
            if future is not None:
                future.set_result(result)
        finally:
            self.step_started = None

    def _close(self) -> None:
        with self._closing:
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                _, future = self._commands.get_nowait()
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_exception(self._dead())
        if self._on_closed is not None:
            self._on_closed()

    def _dead(self) -> EngineDeadError:
        reason = "it was closed" if self.failure is None else repr(self.failure)
        return EngineDeadError(f"the engine has stopped ({reason}): start a new one")
