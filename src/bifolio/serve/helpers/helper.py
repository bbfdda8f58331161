"""The front end's side of a helper process: two lanes of tasks, each with a process of its own.

    handlers ──ask──▶ quick lane ──────────────▶ result
                          └─ longer than QUICK_SECONDS ──▶ slow lane ──▶ result, or its limit is breached

Both lanes take tasks in turn over the shares (keys, or addresses without keys). So a client waits for a moment of each
other client in the quick lane, however long the tasks of the others are. A task that breaches its limits costs its own
request an error and the process of its lane its life. A process that ended for another reason is replaced, and its task
runs once more.
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
from collections import Counter
from dataclasses import dataclass

from bifolio.api.messages import FrameReader, frame
from bifolio.serve.helpers import helper_messages as h
from bifolio.serve.http.errors import ApiError
from bifolio.serve.process.fairness import FairQueue

logger = logging.getLogger(__name__)
QUICK_SECONDS = 0.25  # of CPU time, of a task in the quick lane
SHORTER = 0.2  # part of it for tasks of a share that has another one in the slow lane
CPU_SECONDS = 2.0  # of one task
WALL_SECONDS = 20.0  # of one task, on a machine that is busy with other things
CANCEL_SECONDS = 5.0  # in which a cancelled task ends
START_SECONDS = 120.0  # a large vocabulary takes seconds to read
MEMORY_BYTES = 1 << 30
MAX_WAITING = 64  # tasks of one share
READ_BYTES = 1 << 18
QUICK, SLOW = 0, 1  # lanes


@dataclass(slots=True)
class _Job:
    task: h.Task
    share: str
    result: asyncio.Future[h.Result]


class _Process:
    """A running helper process: results find their tasks by id."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._writer = writer
        self._answers: dict[int, asyncio.Future[h.Result]] = {}
        self._reading = asyncio.create_task(self._read(reader))
        self.is_dead = False

    @classmethod
    async def start(cls) -> _Process:
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "bifolio.serve.helpers.helper_worker", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], start_new_session=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        return cls(process, *await asyncio.open_connection(sock=ours))

    async def exchange(self, task_id: int, message: h.Prepare | h.Run) -> h.Result:
        """Send a message and wait for the result; EOFError if the process has ended."""
        if self.is_dead:
            raise EOFError
        answer: asyncio.Future[h.Result] = asyncio.get_running_loop().create_future()
        self._answers[task_id] = answer
        try:
            self.send(message)
            return await answer
        finally:
            self._answers.pop(task_id, None)

    def send(self, message: h.Prepare | h.Run | h.Cancel) -> None:
        self._writer.write(frame(message))

    async def stop(self) -> None:
        self.is_dead = True
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the processes of its lanes
        await self._process.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        frames = FrameReader(h.from_helper_decoder)
        try:
            while data := await reader.read(READ_BYTES):
                for outcome in frames.feed(data):
                    answer = self._answers.get(outcome.id)
                    if answer is not None and not answer.done():
                        answer.set_result(outcome.result)
        except ConnectionError:
            pass  # it ended with unread messages
        except ValueError:
            logger.exception("a helper process sent a message that cannot be read")
        finally:
            self.is_dead = True
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(EOFError())


class Helper:
    """Runs tasks in processes of their own, started by `begin` or with the first task. Lives on the event loop."""

    def __init__(
        self, prepare: h.Prepare, quick_seconds: float = QUICK_SECONDS, cpu_seconds: float = CPU_SECONDS
    ) -> None:
        self._prepare = prepare
        self._cpu_seconds = (quick_seconds, cpu_seconds)  # of the lanes
        self._queues: tuple[FairQueue[_Job], FairQueue[_Job]] = (FairQueue(), FairQueue())
        self._wakes = (asyncio.Event(), asyncio.Event())
        self._num_open: Counter[str] = Counter()  # tasks of each share
        self._num_slow: Counter[str] = Counter()  # those of them in the slow lane
        self._lanes: list[asyncio.Task[None]] = []
        self._process: _Process | None = None
        self._starting = asyncio.Lock()
        self._beginning: asyncio.Task[None] | None = None
        self._ids = itertools.count(1)
        self.num_restarts = 0

    def begin(self) -> None:
        """Start the process now: the first task need not wait for it."""
        self._beginning = asyncio.create_task(self._begin())

    async def ask(self, task: h.Task, share: str) -> h.Result:
        """The result of a task. `Failed` of the kind `KILLED`: it took too much time or memory."""
        if not self._lanes:
            self._lanes = [asyncio.create_task(self._run(lane)) for lane in (QUICK, SLOW)]
        if self._num_open[share] > MAX_WAITING:
            raise ApiError(429, "too many requests of this key wait to be prepared", "queue_full", retry_after=2)
        job = _Job(task, share, asyncio.get_running_loop().create_future())
        self._num_open[share] += 1
        try:
            self._put(QUICK, job)
            result = await job.result
        finally:
            self._num_open[share] -= 1
            if not self._num_open[share]:
                del self._num_open[share]
        if isinstance(result, h.Failed) and result.kind == h.LOST:
            raise ApiError(503, "a helper process was ended: ask again", "helper_unavailable", retry_after=1)
        return result

    async def close(self) -> None:
        running = [*self._lanes, *([] if self._beginning is None else [self._beginning])]
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._process is not None:
            await self._process.stop()

    # -- details -------------------------------------------------------------------------------------------------------
    async def _begin(self) -> None:
        with contextlib.suppress(OSError, EOFError):  # the first task tries again
            await self._ready_process()

    def _put(self, lane: int, job: _Job) -> None:
        self._queues[lane].put(job.share, job)
        self._wakes[lane].set()

    async def _run(self, lane: int) -> None:
        while True:
            job = self._queues[lane].take()
            if job is None:
                self._wakes[lane].clear()
                await self._wakes[lane].wait()
                continue
            if job.result.done():
                continue  # its client has gone
            seconds = self._cpu_seconds[lane]
            if lane == QUICK and self._num_slow[job.share]:
                seconds *= SHORTER
            result = await self._result(lane, job.task, seconds)
            if isinstance(result, h.Failed) and result.kind == h.SLOW:
                if lane == QUICK:
                    self._make_slow(job)
                    continue
                result = h.Failed(h.KILLED)
            if not job.result.done():
                job.result.set_result(result)

    def _make_slow(self, job: _Job) -> None:
        self._num_slow[job.share] += 1
        job.result.add_done_callback(lambda _: self._end_slow(job.share))
        self._put(SLOW, job)

    def _end_slow(self, share: str) -> None:
        self._num_slow[share] -= 1
        if not self._num_slow[share]:
            del self._num_slow[share]

    async def _result(self, lane: int, task: h.Task, seconds: float) -> h.Result:
        """The result of a task, which runs once more if its process was ended from outside."""
        result: h.Result = h.Failed(h.LOST)
        for _ in range(2):
            try:
                process = await self._ready_process()
                if isinstance(process, h.Failed):
                    return process
                result = await self._attempt(process, lane, task, seconds)
            except (OSError, EOFError):  # also a process that does not start in time
                result = h.Failed(h.LOST)
            if not (isinstance(result, h.Failed) and result.kind == h.LOST):
                break
            logger.warning("a helper process was ended and is replaced")
        return result

    async def _attempt(self, process: _Process, lane: int, task: h.Task, seconds: float) -> h.Result:
        task_id = next(self._ids)
        running = asyncio.create_task(process.exchange(task_id, h.Run(task_id, lane, seconds, task)))
        try:
            await asyncio.wait({running}, timeout=WALL_SECONDS)
            if not running.done():
                process.send(h.Cancel(lane))
                await asyncio.wait({running}, timeout=CANCEL_SECONDS)
            if not running.done():
                await process.stop()  # which ends the exchange
            return await running
        finally:
            running.cancel()  # of a helper that is being closed

    async def _ready_process(self) -> _Process | h.Failed:
        """The process, a new one if there is none or it has died; or the reason why none can be started."""
        async with self._starting:
            if self._process is not None and self._process.is_dead:
                await self._process.stop()
                self._process = None
                self.num_restarts += 1
            if self._process is None:
                process = await _Process.start()
                try:
                    async with asyncio.timeout(START_SECONDS):
                        refused = await process.exchange(0, self._prepare)
                except BaseException:
                    await process.stop()
                    raise
                if isinstance(refused, h.Failed):
                    await process.stop()
                    return refused
                self._process = process
            return self._process


def new_helper(model: str, *, reads_tokenizer: bool, mmproj: str | None = None) -> Helper:
    """A helper for the tasks of one model."""
    return Helper(h.Prepare(model, reads_tokenizer, MEMORY_BYTES, mmproj))
