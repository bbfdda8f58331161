"""The front end's side of a helper process: a queue of tasks, one process, restarted when it breaches a limit.

    handlers ──ask──▶ queue, in turn over the keys ──frame──▶ helper process (`serve.helper_worker`)

A task that breaches its limits costs its own request an error and the process its life; the tasks of other requests run
in the next process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections import OrderedDict, deque

from bifolio.api.messages import FrameReader, frame
from bifolio.serve import helper_messages as h
from bifolio.serve.errors import ApiError

logger = logging.getLogger(__name__)
CPU_SECONDS = 2  # of one task
WALL_SECONDS = 20.0  # of one task, on a machine that is busy with other things
START_SECONDS = 120.0  # a large vocabulary takes seconds to read
MEMORY_BYTES = 1 << 30
MAX_WAITING = 64  # tasks of one key
READ_BYTES = 1 << 18
Job = tuple[h.Task, "asyncio.Future[h.Done | h.Failed]"]


class Helper:
    """Runs tasks in a process of its own, which is started with the first task. Lives on the event loop."""

    def __init__(self, prepare: h.Prepare) -> None:
        self._prepare = prepare
        self._waiting: OrderedDict[str, deque[Job]] = OrderedDict()  # key -> its tasks
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._reader = FrameReader(h.from_helper_decoder)
        self.num_restarts = 0

    async def ask(self, task: h.Task, key: str) -> h.Done | h.Failed:
        """The outcome of a task. `Failed` of the kind "Killed": it took too much time or memory."""
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        queue = self._waiting.setdefault(key, deque())
        if len(queue) >= MAX_WAITING:
            raise ApiError(429, "too many requests of this key wait to be prepared", "queue_full", retry_after=2)
        future: asyncio.Future[h.Done | h.Failed] = asyncio.get_running_loop().create_future()
        queue.append((task, future))
        self._wake.set()
        return await future

    async def close(self) -> None:
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        await self._stop()

    # -- details -------------------------------------------------------------------------------------------------------
    async def _run(self) -> None:
        while True:
            job = self._next()
            if job is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            task, future = job
            if future.done():
                continue  # its client has gone
            outcome = await self._outcome(task)
            if not future.done():
                future.set_result(outcome)

    def _next(self) -> Job | None:
        """The next task of the key whose turn it is; the key then goes to the end."""
        while self._waiting:
            key, queue = self._waiting.popitem(last=False)
            if queue:
                job = queue.popleft()
                if queue:
                    self._waiting[key] = queue
                return job
        return None

    async def _outcome(self, task: h.Task) -> h.Done | h.Failed:
        try:
            if self._streams is None:
                refused = await self._start()
                if isinstance(refused, h.Failed):
                    await self._stop()
                    return refused
            async with asyncio.timeout(WALL_SECONDS):
                return await self._exchange(task)
        except (OSError, EOFError, TimeoutError, ValueError):
            self.num_restarts += 1
            logger.warning("a helper process breached a limit and is restarted")
            await self._stop()
            return h.Failed("Killed", "it takes too much time or memory")

    async def _start(self) -> h.Done | h.Failed:
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bifolio.serve.helper_worker", str(theirs.fileno()), pass_fds=[theirs.fileno()],
                start_new_session=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self._reader = FrameReader(h.from_helper_decoder)
        self._streams = await asyncio.open_connection(sock=ours)
        async with asyncio.timeout(START_SECONDS):
            return await self._exchange(self._prepare)

    async def _exchange(self, message: h.ToHelper) -> h.Done | h.Failed:
        if self._streams is None:
            raise EOFError
        reader, writer = self._streams
        writer.write(frame(message))
        await writer.drain()
        while True:
            data = await reader.read(READ_BYTES)
            if not data:
                raise EOFError
            if found := self._reader.feed(data):
                outcome: h.Done | h.Failed = found[0]
                return outcome

    async def _stop(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].close()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def new_helper(model: str, *, reads_tokenizer: bool) -> Helper:
    """A helper for the tasks of one model."""
    return Helper(h.Prepare(model, reads_tokenizer, CPU_SECONDS, MEMORY_BYTES))
