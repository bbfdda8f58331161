"""Reading requests and writing answers: sizes and times are limited, and a client that goes away is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec
import msgspec.inspect

from bifolio.errors import did_you_mean
from bifolio.garbage import no_garbage_collection
from bifolio.serve.http.auth import Receive, Scope, Send
from bifolio.serve.http.bounds import check_bytes, structs_in
from bifolio.serve.http.context import Limits
from bifolio.serve.http.encoding import encode_json
from bifolio.serve.http.errors import ApiError, bad_request
from bifolio.serve.http.events import Event, encode_event

T = TypeVar("T")
_PATH = re.compile(r"`\$([^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_MEDIA = re.compile(r"(?:enum value '|unknown field `)(?:input_)?(audio|video|file)[a-z_]*['`]")
LARGE_BYTES = 64 << 10  # of a body
DONE = b"data: [DONE]\n\n"
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Framing:
    """How a protocol frames the events of a stream."""

    headers: Sequence[tuple[bytes, bytes]]
    end: bytes  # after the last event
    error: Callable[[ApiError], bytes]  # the event of an error after the first one


OPENAI_EVENTS = Framing(SSE_HEADERS, DONE, lambda error: b"data: " + error.body() + b"\n\n")


async def read_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """The whole body, or a 413 as soon as it is known to be too long."""
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"application/json")
    if kind.partition(b";")[0].strip().lower() != b"application/json":
        raise ApiError(415, "the body must be JSON: send content-type: application/json", "unsupported_media_type")
    declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if declared.isdigit() and int(declared) > limits.max_body_bytes:
        raise too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(499, "the client has gone", "client_closed")
                body += message.get("body", b"")
                if len(body) > limits.max_body_bytes:
                    raise too_large(limits)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        raise ApiError(
            408, f"the request did not arrive in {limits.body_timeout:g} s: send it faster, or a shorter one", "timeout"
        ) from None


def too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the request is larger than {limits.max_body_bytes} bytes", "request_too_large")


def decode(body: bytes, kind: type[T]) -> T:
    """A request of the given type, or a 400 that names the field."""
    try:
        # The collector would look at the million lists of a large body again and again.
        with no_garbage_collection() if len(body) > LARGE_BYTES else contextlib.nullcontext():
            request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        path, unknown = _PATH.search(text), _UNKNOWN_FIELD.search(text)
        name = path[1].lstrip(".") if path is not None else ""
        if unknown is not None:
            text += did_you_mean(unknown[1], _field_names(cast(Any, kind)))
            name = f"{name}.{unknown[1]}" if name else unknown[1]
        if media := _MEDIA.search(text):
            text = f"{name}: this server reads text and images only: remove the {media[1]}"
        raise bad_request(text, name or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply: send flatter JSON") from None
    if isinstance(request, msgspec.Struct):
        check_bytes(request)
    return request


@lru_cache(maxsize=64)
def _field_names(kind: Any) -> tuple[str, ...]:
    """The names of all fields below a request type."""
    found: dict[str, None] = {}
    waiting, seen = [kind], set()
    while waiting:
        struct = waiting.pop()
        if struct in seen or not isinstance(described := msgspec.inspect.type_info(struct), msgspec.inspect.StructType):
            continue
        seen.add(struct)
        for field in described.fields:
            found[field.encode_name] = None
            waiting += [part.cls for part in structs_in(field.type)]
    return tuple(found)


async def send_json(send: Send, value: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    await send_bytes(send, encode_json(value), b"application/json", status, headers)


async def send_bytes(
    send: Send, body: bytes, content_type: bytes, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    head = [(b"content-type", content_type), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_events(
    send: Send,
    events: AsyncIterator[list[Event]],
    write_timeout: float,
    interval: float = 0.0,
    framing: Framing = OPENAI_EVENTS,
) -> None:
    """The events of a stream, those that are ready together in one write.

    The status is sent with the first of them, so that an error before it has its own.
    """
    started = False
    tail = framing.end
    with WriteWatch(write_timeout) as watch:
        try:
            async for body in grouped(events, interval) if interval else encoded(events):
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": framing.headers})
                watch.begin()
                await send({"type": "http.response.body", "body": body, "more_body": True})
                watch.end()
        except ApiError as error:
            if not started or error.status == 499:
                raise
            tail = framing.error(error)
        if not started:
            await send({"type": "http.response.start", "status": 200, "headers": framing.headers})
        watch.begin()
        await send({"type": "http.response.body", "body": tail})


async def encoded(events: AsyncIterator[list[Event]]) -> AsyncIterator[bytes]:
    async for batch in events:
        if batch:
            yield b"".join([encode_event(event) for event in batch])


async def grouped(events: AsyncIterator[list[Event]], interval: float) -> AsyncIterator[bytes]:
    """Encoded events, those of `interval` seconds in one piece. The first event comes at once, the last ones together
    with the end. A browser takes longer for a piece than for the events in it."""
    bodies, clock = encoded(events), asyncio.get_running_loop().time
    upcoming = asyncio.ensure_future(anext(bodies, b""))
    ready, due = b"", 0.0
    try:
        while True:
            await asyncio.wait({upcoming}, timeout=max(due - clock(), 0.0) if ready else None)
            if upcoming.done():
                body = upcoming.result()
                if not body:
                    break
                ready += body
                upcoming = asyncio.ensure_future(anext(bodies, b""))
            if ready and clock() >= due:
                yield ready
                ready, due = b"", clock() + interval
    except ApiError:
        if ready:
            yield ready
        raise
    finally:
        upcoming.cancel()
    if ready:
        yield ready


class WriteWatch:
    """Ends a task whose client has stopped reading. One timer for a whole stream: an own one for each event would cost
    more than the event."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None  # when the write that is in flight began
        self._expired = False

    def __enter__(self) -> WriteWatch:
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._seconds, self._check)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._timer.cancel()
        if self._expired and kind is asyncio.CancelledError and self._task is not None:
            self._task.uncancel()
            raise ApiError(499, "the client stopped reading", "slow_client") from None

    def begin(self) -> None:
        self._since = self._loop.time()

    def end(self) -> None:
        self._since = None

    def _check(self) -> None:
        if self._since is not None and self._loop.time() - self._since >= self._seconds:
            self._expired = True
            if self._task is not None:
                self._task.cancel()
        else:
            self._timer = self._loop.call_later(self._seconds, self._check)
