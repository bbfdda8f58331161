"""uvicorn's HTTP protocol with limits on the headers of a request; imports uvicorn's httptools."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bifolio.serve.connection import HEAD_SECONDS, MAX_HEAD_BYTES, MAX_HEADERS, SILENT_SECONDS, SPARED, Connections
from bifolio.serve.errors import ApiError


class BoundedProtocol(HttpToolsProtocol):
    """Closes connections whose headers are too many, too long or too slow."""

    open_connections: ClassVar[Connections]  # of the server; set by `make_protocol`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._head_bytes = 0
        self._head_open = True
        self._refused = False
        self._last_byte = self.loop.time()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_too_slow)
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._is_full = not self.open_connections.add(self, str(peer[0]) if peer else "")

    @property
    def is_silent(self) -> bool:
        """No byte of a request has come for a while since the connection was opened or the last answer was sent."""
        busy = self.cycle is not None and not self.cycle.response_complete
        waits = not busy and (not self._head_open or self._head_bytes == 0)
        return waits and self.loop.time() - self._last_byte > SILENT_SECONDS

    def close_silent(self) -> None:
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        self.open_connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._last_byte = self.loop.time()
        super().data_received(data)
        if self._head_open and not self._refused:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(ApiError(431, f"the headers are longer than {MAX_HEAD_BYTES} bytes"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._head_open:
            self._head_open, self._head_bytes = True, 0
            self._head_timer.cancel()
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_too_slow)

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(ApiError(431, f"the request has more than {MAX_HEADERS} headers"))
            raise ValueError("too many headers")  # ends the parser's run
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_open = False
        self._head_timer.cancel()
        if self._is_full and self.url.partition(b"?")[0] not in SPARED:
            self._refuse(ApiError(503, "too many connections are open", "too_many_connections", retry_after=2))
        if not self._refused:
            super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not a valid HTTP request"))

    def _head_too_slow(self) -> None:
        if self._head_open and not self.transport.is_closing():
            self._refuse(ApiError(408, "the headers did not arrive in time"))

    def _refuse(self, error: ApiError) -> None:
        """Answer by hand: no request has reached the application."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        busy = self.cycle is not None and not self.cycle.response_complete
        if not busy:  # else the bytes would end up inside another answer
            body = error.body()
            head = f"HTTP/1.1 {error.status} Refused\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
