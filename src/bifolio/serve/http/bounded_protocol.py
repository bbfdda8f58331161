"""uvicorn's HTTP protocol with limits on a request until it has arrived; imports uvicorn's httptools."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bifolio.handshakes import network_of
from bifolio.serve.http.auth import KeyRing
from bifolio.serve.http.connection import (
    HEAD_SECONDS,
    LINGER_SECONDS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    SPARED,
    Connections,
    Stage,
)
from bifolio.serve.http.errors import ApiError


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections whose headers are too many, too long or too slow, and those that make room for others."""

    open_connections: ClassVar[Connections]  # of the server; set by a subclass
    keys: ClassVar[KeyRing]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._head_bytes = 0
        self._head_open = True
        self._body_open = False
        self._bytes_without_body = 0  # since the last byte of a body: chunk headers and trailers
        self._num_trailers = 0
        self._arriving: Any = None  # the cycle of the request whose body is arriving, or was the last to arrive
        self._refused = False
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_too_slow)
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._is_full = not self.open_connections.add(self, network_of(str(peer[0]) if peer else ""))

    @property
    def stage(self) -> Stage:
        """How far the request on this connection has come."""
        if self._body_open:
            return Stage.BODY
        if self.cycle is not None and not self.cycle.response_complete:
            return Stage.BUSY
        return Stage.HEAD if self._head_open and self._head_bytes else Stage.SILENT

    def drop(self) -> None:
        if self.stage is Stage.SILENT:
            self._close()
        else:
            message = "the request did not arrive before later ones: send fewer at a time"
            self._refuse(ApiError(408, message, "timeout", retry_after=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        self.open_connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._bytes_without_body += len(data)
        super().data_received(data)
        if self._refused:
            return
        if self._head_open:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(ApiError(431, f"the headers are longer than {MAX_HEAD_BYTES} bytes"))
        elif self._body_open:
            self.open_connections.begin_body(self)  # now: most bodies arrive with their headers
            if self._bytes_without_body > MAX_HEAD_BYTES:
                self._refuse(ApiError(431, f"the trailers are longer than {MAX_HEAD_BYTES} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._head_open:
            self._head_open, self._head_bytes = True, 0
            self._head_timer.cancel()
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_too_slow)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_open:
            self._num_trailers += 1
        if max(len(self.headers), self._num_trailers) >= MAX_HEADERS:
            self._refuse(ApiError(431, f"the request has more than {MAX_HEADERS} headers"))
            raise ValueError("too many headers")  # ends the parser's run
        if self._head_open:  # trailers of a chunked body are not read: the request is being answered already
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_open, self._body_open = False, True
        self._num_trailers = self._bytes_without_body = 0
        self._head_timer.cancel()
        tenant = self.keys.tenant_of(self.url.partition(b"?")[0], self.headers)
        if tenant is not None and tenant.has_key:
            self._is_full = not self.open_connections.claim(self, tenant.share)
        if self._is_full and self.url.partition(b"?")[0] not in SPARED:
            self._refuse(ApiError(503, "too many connections are open", "too_many_connections", retry_after=2))
        if not self._refused:
            super().on_headers_complete()
            self._arriving = self.cycle

    def on_body(self, body: bytes) -> None:
        self._bytes_without_body = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_open = False
        self.open_connections.end_body(self)
        if not self._refused:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not a valid HTTP request"))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._body_open:  # answered before it had arrived
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._body_too_slow)

    def _body_too_slow(self) -> None:
        if self._body_open:
            self._close()

    def _head_too_slow(self) -> None:
        if self._head_open and not self.transport.is_closing():
            self._refuse(ApiError(408, "the headers did not arrive in time"))

    def _refuse(self, error: ApiError) -> None:
        """Answer by hand: no answer to a request on this connection has begun."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        cycle = self.cycle
        is_next = cycle is self._arriving and not self.pipeline and cycle is not None and not cycle.response_started
        if cycle is None or cycle.response_complete or is_next:  # else the bytes would end up inside another answer
            body = error.body()
            head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self._close()

    def _close(self) -> None:
        self.transport.close()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)  # TLS would wait for the other end
