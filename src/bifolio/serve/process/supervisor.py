"""Keeps an engine process alive, and talks to it.

    front end (asyncio)  <-- socket pair -->  engine process
         EngineProcess                          EngineService

When the process dies, the requests that ran in it are answered with a 503, and a new one is started; requests that
come meanwhile get a 503 that says when to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Protocol

from bifolio.api import messages as m
from bifolio.errors import ConfigError
from bifolio.serve.process import worker_process
from bifolio.serve.process.engine_connection import EngineConnection, Link
from bifolio.serve.process.worker_process import GENTLE_SECONDS, StartedWorker, give_way

logger = logging.getLogger(__name__)
FIRST_DELAY, LONGEST_DELAY = 0.2, 10.0  # seconds between restarts, doubled from the one to the other
HEALTHY_SECONDS = 30.0  # a process that lived so long restarts without delay
DEAD_AFTER = 3.0  # heartbeat timeouts without a heartbeat: the process is killed
KILL_AFTER = 10.0  # seconds that a process gets to shut down


class EngineProcess(EngineConnection):
    """The supervisor of the engine process, and the first front end's way to it.

    Other clients of the engine (`relay`: further front ends, or connections of other hosts) send their requests through
    this one, which counts them all.
    """

    def __init__(
        self,
        launch: m.Launch,
        *,
        command: Sequence[str] | None = None,
        step_timeout: float = 300.0,
        heartbeat_timeout: float = 10.0,
        worker: StartedWorker | None = None,
        starts_gently: bool = False,
    ) -> None:
        """`command` starts the process; the number of its socket is appended. `worker` is the first one, if it runs.

        A process that starts gently leaves the processors to others for some seconds (`give_way`).
        """
        super().__init__(heartbeat_timeout)
        self._launch = launch
        self._command = list(command or worker_process.default_command())
        self._step_timeout = step_timeout
        self._process: asyncio.subprocess.Process | StartedWorker | None = None
        self._worker = worker
        self._starts_gently = starts_gently
        self._runner: asyncio.Task[None] | None = None
        self._greeting: asyncio.Future[m.Hello] | None = None
        self.relay: Relay | None = None

    # -- the process's life ------------------------------------------------------------------------------------------
    async def start(self) -> m.Hello:
        """Start the first process. `ConfigError`: a bad setting or a missing file, which a restart cannot change."""
        self._greeting = asyncio.get_running_loop().create_future()
        self._runner = asyncio.create_task(self._keep_alive())
        return await asyncio.shield(self._greeting)

    async def close(self) -> None:
        """End the process; requests in flight are aborted."""
        self._closing = True
        if self._worker is not None:
            self._worker.connection.close()
        if self._link is not None:
            self._link.send(m.Shutdown())
        if self._process is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), KILL_AFTER)
            self.kill()
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    async def _keep_alive(self) -> None:
        delay = FIRST_DELAY
        while not self._closing:
            born = time.monotonic()
            try:
                await self._run_once()
            except Exception as error:
                logger.exception("the engine process could not be started")
                self._greet_with(ConfigError(f"the engine process could not be started: {error}"))
            self._lose_all()
            if self.relay is not None:
                self.relay.engine_lost()
            if self._closing or (self._greeting is not None and self._greeting.done() and self._greeting.exception()):
                return
            self.num_restarts += 1
            delay = FIRST_DELAY if time.monotonic() - born > HEALTHY_SECONDS else min(delay * 2, LONGEST_DELAY)
            await asyncio.sleep(delay)

    async def _run_once(self) -> None:
        """Start a process and stay until it has ended."""
        ours = await self._start_process()
        if self._starts_gently and self._process is not None:
            give_way(self._process.pid, True)
            asyncio.get_running_loop().call_later(GENTLE_SECONDS, give_way, self._process.pid, False)
        ours.setblocking(False)
        link = Link(self._take, m.from_engine_decoder)
        try:
            await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
            self._link = link
            self._last_beat = time.monotonic()
            link.send(self._launch)
            watch = asyncio.create_task(self._watch())
            await link.closed
            watch.cancel()
        finally:
            self._link = self.hello = None
            link.abort()
            await self._reap()

    async def _start_process(self) -> socket.socket:
        """Our end of the connection to a new process, or to the one that was started before."""
        if self._worker is not None:
            self._process, self._worker = self._worker, None
            return self._process.connection
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, str(theirs.fileno()), pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    async def _reap(self) -> None:
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), 2.0)
        except (TimeoutError, asyncio.CancelledError):
            self.kill()
            await self._process.wait()
        if not self._closing:
            logger.error("the engine process ended with status %s", self._process.returncode)
            self._greet_with(ConfigError("the engine process ended while it was starting: see the log"))

    async def _watch(self) -> None:
        """A process that hangs is as good as dead."""
        while True:
            await asyncio.sleep(1.0)
            if self.hello is not None and time.monotonic() - self._last_beat > DEAD_AFTER * self._heartbeat_timeout:
                logger.error("the engine process sends no heartbeats: it is killed")
                self.kill()

    def _greet_with(self, outcome: m.Hello | ConfigError) -> None:
        if self._greeting is None or self._greeting.done():
            return
        if isinstance(outcome, m.Hello):
            self._greeting.set_result(outcome)
        else:
            self._greeting.set_exception(outcome)

    # -- messages from the engine ------------------------------------------------------------------------------------
    def _take(self, message: m.FromEngine) -> None:
        self._take_common(message)
        if self.relay is not None:
            self.relay.deliver(message)
        if isinstance(message, m.Beat) and message.step_seconds > self._step_timeout:
            logger.error("a step has been running for %.0f s: the engine process is killed", message.step_seconds)
            self.kill()
        elif isinstance(message, m.Hello):
            if self._starts_gently:
                give_way(message.pid, False)
            logger.info("engine ready", extra={"engine_pid": message.pid, "kernels": message.kernels})
            self._greet_with(message)
        elif isinstance(message, m.Fatal):
            logger.error("the engine cannot start: %s", message.message)
            self._greet_with(ConfigError(message.message))

    # -- other clients -------------------------------------------------------------------------------------------------
    @property
    def num_open(self) -> int:
        return super().num_open + (0 if self.relay is None else self.relay.num_open)

    def forward(self, message: m.ToEngine) -> bool:
        """Send a message of another client; False if no engine is ready."""
        if self._link is None or self.hello is None:
            return False
        self._link.send(message)
        return True


class Relay(Protocol):
    """The other clients of an engine, as its supervisor sees them (`helpers.branches`, `engine_host`)."""

    @property
    def num_open(self) -> int:
        """Their requests that have not ended."""
        ...

    def deliver(self, message: m.FromEngine) -> None:
        """Hand a message of the engine to the clients that it concerns."""
        ...

    def engine_lost(self) -> None:
        """The engine process ended, and its requests with it."""
        ...
