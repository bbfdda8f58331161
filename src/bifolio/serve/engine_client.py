"""The requests of one front end to the engine, and their answers.

`EngineProcess` (the supervisor) owns the engine process; further front ends reach it through the first one
(`serve.branch`). Both are an `EngineClient`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bifolio.serve import messages as m
from bifolio.serve.errors import ApiError
from bifolio.serve.stream import RequestStream

if TYPE_CHECKING:
    from bifolio.serve.metrics import Metrics

logger = logging.getLogger(__name__)


class Link(asyncio.Protocol):
    """One connection to an engine process, or to the front end that owns it."""

    def __init__(self, take: Callable[[Any], None], decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._take = take  # called with every message
        self._reader = m.FrameReader(decoder)
        self._transport: asyncio.Transport | None = None
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

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

    def send(self, message: msgspec.Struct) -> None:
        self.write(m.frame(message))

    def write(self, frames: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class EngineClient:
    """Hands requests to the engine and its messages to the requests' streams. Lives on the event loop."""

    reports_engine = True  # whether the metrics of this front end include those of the engine

    def __init__(self, heartbeat_timeout: float = 10.0) -> None:
        self._heartbeat_timeout = heartbeat_timeout  # seconds
        self._link: Link | None = None
        self._streams: dict[str, RequestStream] = {}
        self._answers: dict[str, asyncio.Future[Any]] = {}  # embeddings, pictures and metrics
        self._num_embeddings = 0  # in flight
        self._ids = itertools.count()
        self._last_beat = 0.0
        self.hello: m.Hello | None = None  # of the process that runs now
        self.stats: dict[str, float] = {}
        self._base: dict[str, float] = {}  # counters of the processes before this one
        self.num_restarts = 0

    def begin_drain(self) -> None:
        """Tell other front ends, if any, to refuse new requests."""

    async def metrics(self, own: Metrics) -> bytes:
        """The metrics of all front ends together; `own` are those of this one."""
        return own.render()

    @property
    def is_ready(self) -> bool:
        """Whether the process has greeted and its heartbeats arrive."""
        return self.hello is not None and time.monotonic() - self._last_beat < self._heartbeat_timeout

    @property
    def num_open(self) -> int:
        """Requests that have not ended, embeddings included."""
        return len(self._streams) + self._num_embeddings

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
    def _take_common(self, message: m.FromEngine) -> None:
        """Hand a message to its request."""
        if isinstance(message, m.Updates):
            for update in message.items:
                self._take_update(update)
        elif isinstance(message, m.Refused):
            self._take_refusal(message)
        elif isinstance(message, m.Embedding | m.Picture | m.Recalled):
            self._answer(message.id, message)
        elif isinstance(message, m.Beat):
            self._last_beat, self.stats = time.monotonic(), message.stats
        elif isinstance(message, m.Hello):
            self.hello, self._last_beat = message, time.monotonic()

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
        status, retry_after = REFUSAL_STATUS.get(message.kind, (400, None))
        code = REFUSAL_CODES.get(message.kind)
        error = ApiError(status, message.message, code, param=None, retry_after=retry_after)
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

    def remember(self, name: str, owner: str, request_id: str, body: bytes) -> None:
        """Store a conversation that may be continued; without a body, its blocks are released."""
        if self._link is not None:
            self._link.send(m.Remember(name, owner, request_id, body))

    async def recall(self, name: str, owner: str, *, drops: bool = False) -> m.Recalled:
        """A stored conversation of this owner; with an empty body if there is none."""
        request_id = self.new_id()
        found: m.Recalled = await self._ask(request_id, m.Recall(request_id, name, owner, drops))
        return found

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

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
        if self._link is not None:
            self._link.send(m.Abort(request_ids))

    def _ready_link(self) -> Link:
        if self._link is None or self.hello is None:
            raise unavailable("the engine is starting: ask again in a moment")
        return self._link


COUNTERS = frozenset(
    ("num_steps", "num_prefill_tokens", "num_decode_tokens", "num_preemptions", "num_prompt_tokens",
     "num_cached_tokens", "num_draft_tokens", "num_accepted_tokens", "cpu_seconds")
)  # fmt: skip
REFUSAL_STATUS: dict[str, tuple[int, int | None]] = {  # (HTTP status, seconds to wait); all others: 400
    "EngineError": (500, None),
    "QueueFull": (429, 2),
    "KeyLimit": (429, 1),
    "Unavailable": (503, 2),
}
REFUSAL_CODES = {
    "QueueFull": "queue_full",
    "KeyLimit": "key_limit",
    "Unavailable": "engine_unavailable",
    "PromptTooLongError": "context_length_exceeded",
    "TokenIdError": "invalid_token_id",
    "EmptyPromptError": "empty_prompt",
    "GrammarError": "invalid_grammar",
}


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, "engine_unavailable", retry_after=2)
