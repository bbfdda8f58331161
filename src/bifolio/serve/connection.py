"""Limits on a connection before a request has come through: size and number of headers, and the time they take."""

from __future__ import annotations

import asyncio
from typing import Any

from bifolio.serve.errors import ApiError

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
HEAD_SECONDS = 15.0  # from the first byte of a request, or from the connection, to the end of its headers


def make_protocol() -> Any:
    """A class for uvicorn's `http` setting."""
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ImportError:
        return "h11"  # slower; has a limit on the size of headers of its own

    class BoundedProtocol(HttpToolsProtocol):
        """Closes connections whose headers are too many, too long or too slow."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._head_bytes = 0
            self._head_open = True
            self._refused = False
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_too_slow)
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            self._head_timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._refused:
                return
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

    return BoundedProtocol
