"""Further front ends: processes that listen on the same port and reach the engine through the first front end.

    clients ──▶ front end 0 (supervisor) ──────── socket pair ──▶ engine process
    clients ──▶ front end 1 (serve.helpers.branch) ──▶ front end 0
    clients ──▶ front end 2 (serve.helpers.branch) ──▶ front end 0

Each has its own event loop, tokenizer and helper processes, so HTTP, JSON and detokenisation use several cores. The
first one relays messages, a few for each interval of updates, and holds the state that all share: the engine process,
the limits on open requests and the metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bifolio.api import messages as m
from bifolio.api.client import new_prefix
from bifolio.errors import FaultKind
from bifolio.serve.helpers import branch_messages as b
from bifolio.serve.http.errors import ApiError
from bifolio.serve.process.engine_connection import Link
from bifolio.serve.process.supervisor import EngineProcess
from bifolio.serve.views.metrics import Metrics

logger = logging.getLogger(__name__)
RESTART_SECONDS = 1.0
EXIT_SECONDS = 5.0  # that a front end gets after its drain
Admit = Callable[[str, int], ApiError | None]  # (share, number of requests) -> reason of a refusal


def encode_settings(settings: Any) -> bytes:
    return msgspec.msgpack.encode(settings, enc_hook=str)  # paths


def decode_settings(data: bytes, kind: Any) -> Any:
    return msgspec.msgpack.decode(data, type=kind, dec_hook=lambda wanted, value: Path(value))


class Branch:
    """One further front end: its process, its connection and its open requests."""

    def __init__(self, owner: Branches) -> None:
        self._owner = owner
        self.process: asyncio.subprocess.Process | None = None
        self.link: Link | None = None
        self.open: dict[str, str] = {}  # request id -> share of its client
        self.samples = b""
        self.id_prefix = ""  # of the ids of its requests

    async def run(self) -> None:
        """Start the process and stay until it has ended."""
        self.id_prefix = new_prefix()
        ours, theirs = socket.socketpair()
        command = [sys.executable, *subprocess._args_from_interpreter_flags(), "-m", "bifolio.serve.helpers.branch"]  # type: ignore[attr-defined]
        with theirs:
            self.process = await asyncio.create_subprocess_exec(
                *command, str(theirs.fileno()), pass_fds=[theirs.fileno()], start_new_session=True,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        ours.setblocking(False)
        link = Link(self._take, b.from_branch_decoder)
        await asyncio.get_running_loop().create_connection(lambda: link, sock=ours)
        self.link = link
        link.send(msgspec.structs.replace(self._owner.serve, id_prefix=self.id_prefix))
        if self._owner.engine.hello is not None:
            link.send(self._owner.engine.hello)
        if self._owner.is_closing:  # the drain began while the process was started
            link.send(b.Drain())
        try:
            await link.closed
        finally:
            self.link = None
            link.abort()
            self._abort_all()
            await self._reap()

    def send(self, message: msgspec.Struct) -> None:
        if self.link is not None:
            self.link.send(message)

    def _take(self, message: Any) -> None:
        engine, owner = self._owner.engine, self._owner
        if isinstance(message, b.Samples):
            self.samples = message.body
        elif isinstance(message, b.Scrape):
            self.send(b.Scraped(message.id, owner.own_metrics.render(owner.samples())))
        elif isinstance(message, m.Start | m.Embed):
            self._start(message)
        else:
            if isinstance(message, m.Abort):
                for request_id in message.ids:
                    self.open.pop(request_id, None)
            engine.forward(message)

    def _start(self, message: m.Start | m.Embed) -> None:
        """Pass a request on if the limits, which all front ends share, allow it."""
        share = message.share if isinstance(message, m.Start) else ""
        error = self._owner.admit(share, 1)
        if error is not None:
            kind = FaultKind.KEY_LIMIT if error.code == "key_limit" else FaultKind.QUEUE_FULL
            self.send(m.Refused(message.id, kind, str(error)))
        elif self._owner.engine.forward(message):
            self.open[message.id] = share
        else:
            self.send(m.Refused(message.id, FaultKind.UNAVAILABLE, "the engine is starting: ask again in a moment"))

    def _abort_all(self) -> None:
        """The process is gone: its requests have no reader."""
        if self.open:
            self._owner.engine.forward(m.Abort(list(self.open)))
        self.open.clear()

    async def _reap(self) -> None:
        if self.process is not None:
            try:
                await asyncio.wait_for(self.process.wait(), EXIT_SECONDS)
            except (TimeoutError, asyncio.CancelledError):
                self.kill()
                await self.process.wait()

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()


class Branches:
    """All further front ends. A front end that ends is replaced; its requests are aborted."""

    def __init__(self, engine: EngineProcess, own_metrics: Metrics, serve: b.Serve, admit: Admit, count: int) -> None:
        self.engine = engine
        self.own_metrics = own_metrics
        self.serve = serve
        self.admit = admit
        self._branches = [Branch(self) for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []
        self.is_closing = False
        self._ended: list[bytes] = []  # metrics of front ends that were replaced

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_alive(branch)) for branch in self._branches]

    async def close(self, seconds: float) -> None:
        """Wait for the drain of all front ends, for at most that many seconds, then end them."""
        self.begin_drain()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
        for branch in self._branches:
            branch.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep_alive(self, branch: Branch) -> None:
        while not self.is_closing:
            try:
                await branch.run()
            except OSError:
                logger.exception("a front end could not be started")
            if self.is_closing:
                return
            logger.error("a front end ended: it is replaced")
            if branch.samples:
                self._ended, branch.samples = [*self._ended, branch.samples], b""
            await asyncio.sleep(RESTART_SECONDS)

    # -- for the supervisor ------------------------------------------------------------------------------------------
    @property
    def num_open(self) -> int:
        return sum(len(branch.open) for branch in self._branches)

    def open_per_share(self, share: str) -> int:
        return Counter(known for branch in self._branches for known in branch.open.values())[share]

    def samples(self) -> list[bytes]:
        return [*self._ended, *(branch.samples for branch in self._branches if branch.samples)]

    def begin_drain(self) -> None:
        self.is_closing = True
        self._broadcast(b.Drain())

    def engine_lost(self) -> None:
        for branch in self._branches:
            branch.open.clear()
        self._broadcast(b.Lost())

    def deliver(self, message: m.FromEngine) -> None:
        if isinstance(message, m.Updates):
            self._relay_updates(message)
        elif isinstance(message, m.Hello | m.Beat):
            self._broadcast(message)
        elif isinstance(
            message,
            m.Refused | m.Embedding | m.Picture | m.Recalled | m.AdapterList | m.BranchReply | m.Controlled,
        ):
            branch = self._branch_of(message.id)
            if branch is not None:
                branch.open.pop(message.id, None)
                branch.send(message)

    def _relay_updates(self, message: m.Updates) -> None:
        parts: dict[Branch, list[m.Update]] = {}
        for update in message.items:
            branch = self._branch_of(update.id)
            if branch is not None:
                parts.setdefault(branch, []).append(update)
                if update.ended is not None:
                    branch.open.pop(update.id, None)
        for branch, updates in parts.items():
            branch.send(m.Updates(updates))

    def _branch_of(self, request_id: str) -> Branch | None:
        """The front end whose prefix the id begins with (`EngineConnection.new_id`)."""
        prefix = request_id.partition("-")[0]
        return next((branch for branch in self._branches if branch.id_prefix == prefix), None)

    def _broadcast(self, message: msgspec.Struct) -> None:
        for branch in self._branches:
            branch.send(message)
