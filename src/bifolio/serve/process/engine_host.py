"""`bifolio engine`: an engine process that front ends of other hosts use (`serve.process.remote_engine`).

    front end ── TCP ──▶ engine host ── socket pair ──▶ engine process
    front end ── TCP ──▶      (relays; restarts the process as a front end of its own would)

A client gives its ids a prefix, by which updates find their way back. Clients that leave have their requests aborted;
clients that do not read are closed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from bifolio.api import messages as m
from bifolio.errors import ConfigError, FaultKind
from bifolio.handshakes import HANDSHAKE_SECONDS, Handshakes
from bifolio.serve.process import handshake as h
from bifolio.serve.process.engine_connection import Link
from bifolio.serve.process.supervisor import EngineProcess

logger = logging.getLogger(__name__)
MAX_CLIENTS = 256  # front ends that have proved that they know the secret
MAX_UNSENT_BYTES = 64 << 20  # of updates that a client does not read: then its connection is closed


class Client:
    """One connection."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host
        self._nonce = h.new_nonce()
        self.id_prefix = ""  # set by a valid handshake
        self.open: set[str] = set()  # ids of its requests
        self.link = Link(self._take, h.to_host_decoder, h.HANDSHAKE_BYTES)

    async def run(self) -> None:
        """Stay until the connection ends, then abort its requests."""
        await self.link.connected
        self.link.send(h.Challenge(h.VERSION, self._nonce))
        loop = asyncio.get_running_loop()
        handshakes = self._host.handshakes
        handshakes.begin(self, self.link.address, self.link.abort)
        limit = loop.call_later(HANDSHAKE_SECONDS, lambda: None if self.id_prefix else self.link.abort())
        try:
            await self.link.closed
        finally:
            limit.cancel()
            handshakes.end(self)
            self.link.abort()
            if self.open:
                self._host.engine.forward(m.Abort(list(self.open)))

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; a client that does not read is closed, so that its updates do not fill the memory."""
        if self.link.num_unsent > MAX_UNSENT_BYTES:
            logger.error("a client does not read its updates: its connection is closed")
            self.link.abort()
        else:
            self.link.send(message)

    def _take(self, message: Any) -> None:
        engine = self._host.engine
        if not self.id_prefix:
            self._shake_hands(message)
        elif isinstance(message, m.Abort):
            self.open.difference_update(message.ids)
            engine.forward(m.Abort([one for one in message.ids if self._owns(one)]))
        elif isinstance(message, h.Attach) or not self._owns(
            message.request_id if isinstance(message, m.Remember) else message.id
        ):
            self.link.abort()  # ids of other clients
        elif isinstance(message, m.Start | m.Embed | m.Look | m.Recall | m.Adapt | m.BranchCall | m.Control):
            self._start(message)
        else:
            engine.forward(message)

    def _start(self, message: m.Start | m.Embed | m.Look | m.Recall | m.Adapt | m.BranchCall | m.Control) -> None:
        host = self._host
        if host.num_open >= host.max_open:
            self.send(m.Refused(message.id, FaultKind.QUEUE_FULL, f"{host.num_open} requests are in flight: ask later"))
        elif host.engine.forward(message):
            self.open.add(message.id)
        else:
            self.send(m.Refused(message.id, FaultKind.UNAVAILABLE, "the engine is starting: ask again in a moment"))

    def _owns(self, request_id: str) -> bool:
        return request_id.startswith(self.id_prefix + "-")

    def _shake_hands(self, message: Any) -> None:
        host = self._host
        if (
            not isinstance(message, h.Attach)
            or not h.is_valid(message, host.secret, self._nonce)
            or message.id_prefix in host.clients
        ):
            logger.warning("a connection without the secret was closed")
            self.link.abort()
            return
        if len(host.clients) >= MAX_CLIENTS:
            logger.error("a front end was refused: %d are connected", len(host.clients))
            self.link.abort()
            return
        host.handshakes.end(self)
        self.id_prefix = message.id_prefix
        host.clients[self.id_prefix] = self
        self.link.trust()
        self.link.send(h.Welcome(h.host_proof(host.secret, self._nonce, message.nonce)))
        if host.engine.hello is not None:
            self.link.send(host.engine.hello)


class EngineHost:
    """Accepts connections and relays their messages."""

    def __init__(self, engine: EngineProcess, secret: bytes, max_open: int = 4096) -> None:
        self.engine = engine
        self.secret = secret
        self.max_open = max_open  # requests of all clients
        self.clients: dict[str, Client] = {}  # prefix of ids -> client
        self.handshakes = Handshakes()  # connections that are no clients yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        engine.relay = self

    async def listen(self, address: str) -> int:
        """Accept connections; the port, which the system chooses for port 0."""
        name, port = h.parse_address(address)
        try:
            self._server = await asyncio.get_running_loop().create_server(self._accept, name, port)
        except OSError as error:
            raise ConfigError(f"{address} cannot be listened on: {error}") from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self) -> Link:
        client = Client(self)
        task = asyncio.get_running_loop().create_task(self._run(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return client.link

    async def _run(self, client: Client) -> None:
        try:
            await client.run()
        finally:
            if self.clients.get(client.id_prefix) is client:
                del self.clients[client.id_prefix]

    # -- for the supervisor ------------------------------------------------------------------------------------------
    @property
    def num_open(self) -> int:
        return sum(len(client.open) for client in self.clients.values())

    def deliver(self, message: m.FromEngine) -> None:
        if isinstance(message, m.Updates):
            self._deliver_updates(message)
        elif isinstance(message, m.Hello | m.Beat):
            for client in list(self.clients.values()):
                client.send(message)
        elif isinstance(
            message,
            m.Refused | m.Embedding | m.Picture | m.Recalled | m.AdapterList | m.BranchReply | m.Controlled,
        ):
            owner = self._owner(message.id)
            if owner is not None:
                owner.open.discard(message.id)
                owner.send(message)

    def engine_lost(self) -> None:
        for client in list(self.clients.values()):
            client.open.clear()
            client.send(h.Lost())

    def _deliver_updates(self, message: m.Updates) -> None:
        parts: dict[str, list[m.Update]] = {}
        for update in message.items:
            owner = self._owner(update.id)
            if owner is not None:
                parts.setdefault(owner.id_prefix, []).append(update)
                if update.ended is not None:
                    owner.open.discard(update.id)
        for prefix, updates in parts.items():
            self.clients[prefix].send(m.Updates(updates))

    def _owner(self, request_id: str) -> Client | None:
        return self.clients.get(request_id.partition("-")[0])


async def host_engine(launch: m.Launch, address: str, secret: bytes, **options: Any) -> None:
    """Run an engine process for other hosts until cancelled."""
    engine = EngineProcess(launch, **options)
    host = EngineHost(engine, secret)
    try:
        hello = await engine.start()
        for line in hello.plan:
            logger.info("memory plan: %s", line)
        port = await host.listen(address)
        logger.info("engine listens", extra={"address": f"{h.parse_address(address)[0]}:{port}"})
        await asyncio.Event().wait()
    finally:
        await host.close()
        await engine.close()
