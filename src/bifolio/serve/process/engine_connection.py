"""An engine client over a connection: requests out, messages in.

The base of all clients of `api.client`. They differ in the way to the engine and in its life: `EngineProcess`
(`supervisor`) owns a process, further front ends reach it through the first one (`helpers.branch`), `RemoteEngine`
(`remote_engine`) connects to another host, `LocalEngine` (`local_engine`) has a thread of this process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from bifolio.api import messages as m
from bifolio.api.client import EngineState, Health, new_prefix
from bifolio.api.update_stream import UpdateStream
from bifolio.errors import EngineFaultError, FaultKind

logger = logging.getLogger(__name__)


class MessageLink(Protocol):
    """The way of messages to an engine."""

    def send(self, message: msgspec.Struct) -> None: ...

    def send_all(self, messages: Sequence[msgspec.Struct]) -> None: ...


class Link(asyncio.Protocol):
    """One connection to an engine process, or to the front end or host that owns it."""

    def __init__(
        self,
        take: Callable[[Any], None],
        decoder: msgspec.msgpack.Decoder[Any],
        max_bytes: int = m.MAX_FRAME_BYTES,
    ) -> None:
        self._take = take  # called with every message
        self._reader = m.FrameReader(decoder, max_bytes)
        self._transport: asyncio.Transport | None = None
        self.connected = asyncio.get_running_loop().create_future()
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.connected.set_result(None)

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except Exception:
            logger.exception("the other process sent a message that cannot be read")
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def trust(self) -> None:
        """Accept frames of any size: the other end has proved that it knows the secret."""
        self._reader.max_bytes = m.MAX_FRAME_BYTES

    def send(self, message: msgspec.Struct) -> None:
        self.write(m.frame(message))

    def send_all(self, messages: Sequence[msgspec.Struct]) -> None:
        self.write(b"".join([m.frame(message) for message in messages]))

    def write(self, frames: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames)

    @property
    def address(self) -> str:
        """Of the other end; empty for a socket pair."""
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    @property
    def num_unsent(self) -> int:
        """Bytes that the other end has not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class EngineConnection:
    """Hands requests to the engine and its messages to the requests' streams. Lives on the event loop."""

    def __init__(self, heartbeat_timeout: float = 10.0, id_prefix: str | None = None) -> None:
        self._heartbeat_timeout = heartbeat_timeout  # seconds
        self._link: MessageLink | None = None
        self._streams: dict[str, UpdateStream] = {}
        self._answers: dict[str, asyncio.Future[Any]] = {}  # embeddings, pictures and metrics
        self._num_embeddings = 0  # in flight
        self._ids = itertools.count()
        self.id_prefix = id_prefix or new_prefix()
        self._last_beat = 0.0
        self._step_seconds = 0.0
        self._closing = False
        self.hello: m.Hello | None = None  # of the engine that runs now
        self.adapters: list[m.AdapterInfo] = []
        self.stats: dict[str, float] = {}
        self._base: dict[str, float] = {}  # counters of the engines before this one
        self.num_restarts = 0

    def health(self) -> Health:
        """Whether the engine has greeted and its heartbeats arrive."""
        if self._closing:
            state = EngineState.CLOSED
        elif self.hello is None:
            state = EngineState.STARTING
        else:
            is_silent = time.monotonic() - self._last_beat >= self._heartbeat_timeout
            state = EngineState.SILENT if is_silent else EngineState.READY
        return Health(state, self.num_restarts, self._step_seconds)

    @property
    def num_open(self) -> int:
        """Requests that have not ended, embeddings included."""
        return len(self._streams) + self._num_embeddings

    def _lose_all(self) -> None:
        """Everything that was in flight in the engine is lost."""
        error = lost("the engine process ended while the request ran: it is being restarted, ask again")
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

    def fail_all(self, error: Exception) -> None:
        """End every request that is in flight."""
        for stream in set(self._streams.values()):
            stream.fail(error)

    def counter(self, name: str) -> float:
        """A counter over all engines so far; it never goes back."""
        return self._base.get(name, 0.0) + self.stats.get(name, 0.0)

    # -- messages from the engine ------------------------------------------------------------------------------------
    def _take_common(self, message: Any) -> None:
        """Hand a message to its request."""
        if isinstance(message, m.Updates):
            for update in message.items:
                self._take_update(update)
        elif isinstance(message, m.Refused):
            self._take_refusal(message)
        elif isinstance(message, m.Embedding | m.Picture | m.Recalled | m.BranchReply | m.Controlled):
            self._answer(message.id, message)
        elif isinstance(message, m.AdapterList):
            self.adapters = message.adapters
            self._answer(message.id, message)
        elif isinstance(message, m.Beat):
            self._last_beat, self._step_seconds, self.stats = time.monotonic(), message.step_seconds, message.stats
            self.adapters = message.adapters
        elif isinstance(message, m.Hello):
            self.hello, self._last_beat, self.adapters = message, time.monotonic(), message.adapters

    def _answer(self, request_id: str, message: Any) -> None:
        answer = self._answers.pop(request_id, None)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _take_update(self, update: m.Update) -> None:
        stream = self._streams.get(update.id)
        if stream is None:
            return
        if update.ended is not None:
            del self._streams[update.id]
        stream.push(update)

    def _take_refusal(self, message: m.Refused) -> None:
        error = EngineFaultError(message.kind, message.message)
        stream = self._streams.pop(message.id, None)
        if stream is not None:
            stream.fail(error)
        answer = self._answers.pop(message.id, None)
        if answer is not None and not answer.done():
            answer.set_exception(error)

    # -- requests ------------------------------------------------------------------------------------------------------
    def new_id(self) -> str:
        """An id for a request, unique across processes and hosts."""
        return f"{self.id_prefix}-{next(self._ids):x}"

    def submit(self, requests: Sequence[m.Start]) -> UpdateStream:
        """Hand requests to the engine; close the stream when done with them."""
        link = self._ready_link()
        stream = UpdateStream((request.id for request in requests), self.abort)
        self._streams |= dict.fromkeys((request.id for request in requests), stream)
        link.send_all(requests)
        return stream

    def stop(self, request_id: str, index: int, stop_reason: str) -> None:
        """End one completion of a request, in which a stop text was found."""
        if self._link is not None:
            self._link.send(m.Stop(request_id, index, stop_reason))

    async def embed(self, token_ids: list[int], pooling: m.Pooling | None = None) -> bytes:
        """f32[d] as bytes; of other tasks f32[tokens, d], or f32[labels]."""
        request_id = self.new_id()
        self._num_embeddings += 1
        try:
            answer: m.Embedding = await self._ask(request_id, m.Embed(request_id, token_ids, pooling or m.Pooling()))
        finally:
            self._num_embeddings -= 1
        return answer.vector

    async def snapshot(self) -> m.Picture:
        """Slots, queue and blocks at one moment."""
        request_id = self.new_id()
        picture: m.Picture = await self._ask(request_id, m.Look(request_id))
        return picture

    def remember(
        self,
        name: str,
        owner: str,
        request_id: str,
        body: bytes,
        share: str = "",
        *,
        salt: bytes = b"",
        token_ids: bytes = b"",
    ) -> None:
        """Store a conversation that may be continued; without a body, its blocks are released."""
        if self._link is not None:
            self._link.send(m.Remember(name, owner, request_id, body, share, salt, token_ids))

    async def recall(
        self, name: str, owner: str, *, drops: bool = False, share: str = "", salt: bytes = b""
    ) -> m.Recalled:
        """A stored conversation of this owner; with an empty body if there is none."""
        request_id = self.new_id()
        found: m.Recalled = await self._ask(request_id, m.Recall(request_id, name, owner, drops, share, salt))
        return found

    async def adapt(self, name: str, path: str = "", *, in_place: bool = False) -> None:
        """Load an adapter, or forget its name where there is no path."""
        request_id = self.new_id()
        await self._ask(request_id, m.Adapt(request_id, name, path, in_place))

    async def scale_adapters(self, scales: dict[str, float]) -> None:
        """Set the factors of the adapters in requests that name none; those of others are 0."""
        request_id = self.new_id()
        await self._ask(request_id, m.Adapt(request_id, "", scales=scales))

    async def branch(self, call: m.BranchCall) -> m.BranchReply:
        """Run a verb on a branch; its id is set here."""
        call = msgspec.structs.replace(call, id=self.new_id())
        reply: m.BranchReply = await self._ask(call.id, call)
        return reply

    async def control(self, control: m.Control) -> m.Controlled:
        """Pause, resume, update the engine or let it sleep; its state afterwards."""
        control = msgspec.structs.replace(control, id=self.new_id())
        done: m.Controlled = await self._ask(control.id, control)
        return done

    async def _ask(self, request_id: str, message: msgspec.Struct) -> Any:
        link = self._ready_link()
        answer = asyncio.get_running_loop().create_future()
        self._answers[request_id] = answer
        link.send(message)
        try:
            return await answer
        finally:
            if self._answers.pop(request_id, None) is not None and self._link is link:
                link.send(m.Abort([request_id]))  # cancelled

    def abort(self, request_ids: list[str]) -> None:
        """End requests before the next step; no update of them follows."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        if self._link is not None:
            self._link.send(m.Abort(request_ids))

    def _ready_link(self) -> MessageLink:
        if self._link is None or self.hello is None:
            raise EngineFaultError(FaultKind.UNAVAILABLE, "the engine is starting: ask again in a moment")
        return self._link


COUNTERS = frozenset(
    ("num_steps", "num_prefill_tokens", "num_decode_tokens", "num_preemptions", "num_prompt_tokens",
     "num_cached_tokens", "num_draft_tokens", "num_accepted_tokens", "cpu_seconds", "num_forced_tokens")
)  # fmt: skip


def lost(message: str) -> EngineFaultError:
    """The fault of requests whose engine has gone."""
    return EngineFaultError(FaultKind.LOST, message)
