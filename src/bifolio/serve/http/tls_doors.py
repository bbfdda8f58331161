"""TLS in front of HTTP: a connection is counted, and has a time limit, from its first moment.

    accepted ──▶ handshake ──▶ HTTP (`serve.http.bounded_protocol`)
    |<---- TlsDoor, 5 s ---->|

An event loop that accepts TLS connections shows them after their handshake, for which it allows a minute: connections
that send nothing would take descriptors without a limit until then. `TlsDoors` accepts them itself, counts each as a
silent one of its address (`serve.http.connection`), and hands it to HTTP when the handshake has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from bifolio.handshakes import HANDSHAKE_SECONDS, network_of
from bifolio.serve.http.connection import Connections, Stage

NewProtocol = Callable[[], asyncio.Protocol]
BACKLOG = 2048
ACCEPT_PAUSE_SECONDS = 0.05  # after a connection that could not be accepted


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """The settings of a server with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(certificate, key)
    return context


class TlsDoor(asyncio.Protocol):
    """A connection until its handshake has ended."""

    def __init__(self, connection: socket.socket, connections: Connections, new_protocol: NewProtocol) -> None:
        self._connection = connection
        self._connections = connections
        self._new_protocol = new_protocol

    @property
    def stage(self) -> Stage:
        return Stage.SILENT

    def drop(self) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            self._connection.shutdown(socket.SHUT_RDWR)  # the handshake fails

    async def run(self, address: str, context: ssl.SSLContext) -> None:
        """Let the loop do the handshake; after it the loop calls `connection_made`."""
        self._connections.add(self, network_of(address))
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self, self._connection, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError:  # no TLS, too slow, gone or dropped
            self._connection.close()
        finally:
            self._connections.remove(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connections.remove(self)  # HTTP counts it from now on
        protocol = self._new_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


class TlsDoors:
    """Accepts the connections of a server; has the methods of `asyncio.Server` that uvicorn calls."""

    def __init__(self, context: ssl.SSLContext, connections: Connections) -> None:
        self._context = context
        self._connections = connections
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, sockets: Sequence[socket.socket], new_protocol: NewProtocol) -> None:
        for listener in sockets:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._start(self._accept(listener, new_protocol))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket, new_protocol: NewProtocol) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, peer = await loop.sock_accept(listener)
            except OSError:  # no descriptor is free, or the client has gone
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(TlsDoor(connection, self._connections, new_protocol).run(str(peer[0]), self._context))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
