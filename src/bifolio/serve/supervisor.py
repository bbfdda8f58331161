"""Keeps an engine process alive, and talks to it.

    front end (asyncio)  <-- socket pair -->  engine process
         EngineProcess                          EngineService

When the process dies, the requests that ran in it are answered with a 503, and a new one is started; requests that
come meanwhile get a 503 that says when to come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bifolio.errors import ConfigError
from bifolio.serve import messages as m
from bifolio.serve.errors import ApiError
from bifolio.serve.stream import RequestStream

logger = logging.getLogger(__name__)
FIRST_DELAY, LONGEST_DELAY = 0.2, 10.0  # seconds between restarts, doubled from the one to the other
HEALTHY_SECONDS = 30.0  # a process that lived so long restarts without delay
DEAD_AFTER = 3.0  # heartbeat timeouts without a heartbeat: the process is killed
KILL_AFTER = 10.0  # seconds that a process gets to shut down


class _Link(asyncio.Protocol):
    """One connection to one engine process."""

    def __init__(self, owner: EngineProcess) -> None:
        self._owner = owner
        self._reader = m.FrameReader(m.from_engine_decoder)
        self._transport: asyncio.Transport | None = None
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._owner._take(message)
        except Exception:
            logger.exception("the engine process sent something that cannot be read")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, message: m.ToEngine) -> None:
        self.write(m.frame(message))

    def write(self, frames: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class EngineProcess:
    """The supervisor, and the front end's only way to the engine."""

    def __init__(
        self,
        launch: m.Launch,
        *,
        command: Sequence[str] | None = None,
        step_timeout: float = 300.0,
        heartbeat_timeout: float = 10.0,
    ) -> None:
        """`command` starts the process; the number of its socket is appended."""
        self._launch = launch
        self._command = list(command or default_command())
        self._step_timeout = step_timeout
        self._heartbeat_timeout = heartbeat_timeout  # seconds
        self._link: _Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._runner: asyncio.Task[None] | None = None
        self._greeting: asyncio.Future[m.Hello] | None = None
        self._streams: dict[str, RequestStream] = {}
        self._answers: dict[str, asyncio.Future[Any]] = {}  # embeddings and pictures
        self._num_embeddings = 0  # in flight
        self._ids = itertools.count()
        self._closing = False
        self._last_beat = 0.0
        self.hello: m.Hello | None = None  # of the process that runs now
        self.stats: dict[str, float] = {}
        self._base: dict[str, float] = {}  # counters of the processes before this one
        self.num_restarts = 0

    # -- the process's life ------------------------------------------------------------------------------------------
    async def start(self) -> m.Hello:
        """Start the first process. `ConfigError`: a bad setting or a missing file, which a restart cannot change."""
        self._greeting = asyncio.get_running_loop().create_future()
        self._runner = asyncio.create_task(self._keep_alive())
        return await asyncio.shield(self._greeting)

    async def close(self) -> None:
        """End the process; requests in flight are aborted."""
        self._closing = True
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

    @property
    def is_ready(self) -> bool:
        """Whether the process has greeted and its heartbeats arrive."""
        return self.hello is not None and time.monotonic() - self._last_beat < self._heartbeat_timeout

    @property
    def num_open(self) -> int:
        """Requests that have not ended, embeddings included."""
        return len(self._streams) + self._num_embeddings

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
            if self._closing or (self._greeting is not None and self._greeting.done() and self._greeting.exception()):
                return
            self.num_restarts += 1
            delay = FIRST_DELAY if time.monotonic() - born > HEALTHY_SECONDS else min(delay * 2, LONGEST_DELAY)
            await asyncio.sleep(delay)

    async def _run_once(self) -> None:
        """Start a process and stay until it has ended."""
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
        ours.setblocking(False)
        link = _Link(self)
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

    def _lose_all(self) -> None:
        """Everything that was under way in the process is lost."""
        error = unavailable("the engine process ended while the request ran: it is being restarted, ask again")
        for stream in set(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # marks it as read: the client may be gone
        self._answers.clear()
        for name, value in self.stats.items():
            if name in COUNTERS:
                self._base[name] = self._base.get(name, 0.0) + value
        self.stats = {}

    def fail_all(self, error: ApiError) -> None:
        """End every request that is under way."""
        for stream in set(self._streams.values()):
            stream.fail(error)

    def counter(self, name: str) -> float:
        """A counter over all processes so far; it never goes back."""
        return self._base.get(name, 0.0) + self.stats.get(name, 0.0)

    # -- messages from the engine ------------------------------------------------------------------------------------
    def _take(self, message: m.FromEngine) -> None:
        if isinstance(message, m.Updates):
            for update in message.items:
                self._take_update(update)
        elif isinstance(message, m.Beat):
            self._last_beat = time.monotonic()
            self.stats = message.stats
            if message.step_seconds > self._step_timeout:
                logger.error("a step has been running for %.0f s: the engine process is killed", message.step_seconds)
                self.kill()
        elif isinstance(message, m.Refused):
            self._take_refusal(message)
        elif isinstance(message, m.Embedding | m.Picture):
            answer = self._answers.pop(message.id, None)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, m.Hello):
            self.hello, self._last_beat = message, time.monotonic()
            logger.info("engine ready", extra={"engine_pid": message.pid, "kernels": message.kernels})
            self._greet_with(message)
        elif isinstance(message, m.Fatal):
            logger.error("the engine cannot start: %s", message.message)
            self._greet_with(ConfigError(message.message))

    def _take_update(self, update: m.Update) -> None:
        stream = self._streams.get(update.id)
        if stream is None:
            return
        if update.ended is not None:
            del self._streams[update.id]
        stream.push(update)

    def _take_refusal(self, message: m.Refused) -> None:
        status = 500 if message.kind == "EngineError" else 400
        error = ApiError(status, message.message, REFUSAL_CODES.get(message.kind), param=None)
        stream = self._streams.pop(message.id, None)
        if stream is not None:
            stream.fail(error)
        answer = self._answers.pop(message.id, None)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    # -- requests ------------------------------------------------------------------------------------------------------
    def new_id(self) -> str:
        return f"{os.getpid():x}-{next(self._ids):x}"

    def submit(self, starts: Sequence[m.Start]) -> RequestStream:
        """Hand requests to the engine; close the stream when done with them."""
        link = self._ready_link()
        stream = RequestStream((start.id for start in starts), self._abort)
        frames = b"".join(m.frame(start) for start in starts)
        self._streams |= dict.fromkeys((start.id for start in starts), stream)
        link.write(frames)
        return stream

    def stop(self, request_id: str, index: int, stop_reason: str) -> None:
        """End one completion of a request, in which a stop text was found."""
        if self._link is not None:
            self._link.send(m.Stop(request_id, index, stop_reason))

    async def embed(self, token_ids: list[int]) -> bytes:
        """f32[hidden] as bytes, of length 1."""
        request_id = self.new_id()
        self._num_embeddings += 1
        try:
            answer: m.Embedding = await self._ask(request_id, m.Embed(request_id, token_ids))
        finally:
            self._num_embeddings -= 1
        return answer.vector

    async def look(self) -> m.Picture:
        request_id = self.new_id()
        picture: m.Picture = await self._ask(request_id, m.Look(request_id))
        return picture

    async def _ask(self, request_id: str, message: m.Embed | m.Look) -> Any:
        link = self._ready_link()
        answer = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        link.send(message)
        try:
            return await answer
        finally:
            if self._answers.pop(request_id, None) is not None and self._link is link:
                link.send(m.Abort([request_id]))  # cancelled

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        if self._link is not None:
            self._link.send(m.Abort(request_ids))

    def _ready_link(self) -> _Link:
        if self._link is None or self.hello is None:
            raise unavailable("the engine is starting: ask again in a moment")
        return self._link


COUNTERS = frozenset(
    ("num_steps", "num_prefill_tokens", "num_decode_tokens", "num_preemptions", "num_prompt_tokens",
     "num_cached_tokens", "num_draft_tokens", "num_accepted_tokens", "cpu_seconds")
)  # fmt: skip
REFUSAL_CODES = {
    "PromptTooLongError": "context_length_exceeded",
    "TokenIdError": "invalid_token_id",
    "EmptyPromptError": "empty_prompt",
    "GrammarError": "invalid_grammar",
}


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, "engine_unavailable", retry_after=2)


def default_command() -> list[str]:
    """This interpreter, with its own flags (such as -O)."""
    return [sys.executable, *subprocess._args_from_interpreter_flags(), "-m", "bifolio.serve.worker"]  # type: ignore[attr-defined]
