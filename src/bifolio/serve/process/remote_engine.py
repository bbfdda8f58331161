"""An engine on another host, behind `serve.process.engine_host`.

The client connects again when the connection breaks; requests that ran meanwhile are lost, as they are with an engine
process that ends. Other front ends may use the same host.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from typing import Any

from bifolio.api import messages as m
from bifolio.errors import ConfigError
from bifolio.handshakes import HANDSHAKE_SECONDS
from bifolio.serve.process import handshake as h
from bifolio.serve.process.engine_connection import EngineConnection, Link, lost

logger = logging.getLogger(__name__)
FIRST_DELAY, LONGEST_DELAY = 0.2, 5.0  # seconds between attempts to connect
CONNECT_SECONDS = 5.0
DEAD_AFTER = 3.0  # heartbeat timeouts without a heartbeat: the connection is closed and made anew


class RemoteEngine(EngineConnection):
    """An engine client over TCP."""

    def __init__(self, address: str, secret: bytes, *, heartbeat_timeout: float = 10.0) -> None:
        super().__init__(heartbeat_timeout)
        self._host, self._port = h.parse_address(address)
        self._secret = secret
        self._runner: asyncio.Task[None] | None = None
        self._greeting: asyncio.Future[m.Hello] | None = None
        self._nonce = b""
        self._challenge = b""
        self._is_trusted = False

    async def start(self) -> m.Hello:
        """Connect. `ConfigError` if the first attempt fails; later ones are repeated."""
        self._greeting = asyncio.get_running_loop().create_future()
        self._runner = asyncio.create_task(self._keep_connected())
        return await asyncio.shield(self._greeting)

    async def close(self) -> None:
        """Leave the host; it aborts the requests of this client."""
        self._closing = True
        self.fail_all(lost("the connection to the engine was closed while the request ran"))
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)

    async def _keep_connected(self) -> None:
        delay = FIRST_DELAY
        while not self._closing:
            born = time.monotonic()
            reason = "the other end closed the connection"
            try:
                await self._run_once()
            except (OSError, TimeoutError) as error:
                reason = str(error) or type(error).__name__
            finally:
                self._lose_all()
            if self._greeting is not None and not self._greeting.done():
                self._greeting.set_exception(
                    ConfigError(
                        f"no engine answers at {self._host}:{self._port} ({reason}): check the address, the secret and "
                        "that `bifolio engine` of the same version runs there"
                    )
                )
                return
            logger.error("the connection to the engine at %s:%d ended: %s", self._host, self._port, reason)
            self.num_restarts += 1
            delay = FIRST_DELAY if time.monotonic() - born > LONGEST_DELAY else min(delay * 2, LONGEST_DELAY)
            await asyncio.sleep(delay)

    async def _run_once(self) -> None:
        """Connect and stay until the connection ends."""
        self._is_trusted, self._nonce = False, h.new_nonce()
        link = Link(self._take, h.from_host_decoder, h.HANDSHAKE_BYTES)
        loop = asyncio.get_running_loop()
        self._link = link  # messages may come before the next line has returned
        async with asyncio.timeout(CONNECT_SECONDS):
            await loop.create_connection(lambda: link, self._host, self._port)
        self._last_beat = time.monotonic()
        limit = loop.call_later(HANDSHAKE_SECONDS, lambda: None if self._is_trusted else link.abort())
        watch = asyncio.create_task(self._watch(link))
        try:
            await link.closed
        finally:
            self._link = self.hello = None
            limit.cancel()
            watch.cancel()
            link.abort()

    async def _watch(self, link: Link) -> None:
        """A host that sends nothing is as good as gone."""
        while True:
            await asyncio.sleep(1.0)
            if self.hello is not None and time.monotonic() - self._last_beat > DEAD_AFTER * self._heartbeat_timeout:
                logger.error("the engine at %s:%d sends no heartbeats", self._host, self._port)
                link.abort()

    def _take(self, message: Any) -> None:
        if not self._is_trusted:
            self._shake_hands(message)
            return
        self._take_common(message)
        if isinstance(message, h.Lost):
            self.hello = None
            self.num_restarts += 1
            self._lose_all()
        elif isinstance(message, m.Hello) and self._greeting is not None and not self._greeting.done():
            self._greeting.set_result(message)

    def _shake_hands(self, message: Any) -> None:
        link = self._link
        if not isinstance(link, Link):
            return
        if isinstance(message, h.Challenge) and message.version == h.VERSION and not self._challenge_known(message):
            proof = h.client_proof(self._secret, message.nonce, self._nonce, self.id_prefix)
            link.send(h.Attach(self._nonce, self.id_prefix, proof))
        elif isinstance(message, h.Welcome) and hmac.compare_digest(
            message.proof, h.host_proof(self._secret, self._challenge, self._nonce)
        ):
            self._is_trusted = True
            link.trust()
        else:
            link.abort()

    def _challenge_known(self, message: h.Challenge) -> bool:
        """Remember a challenge; True for one that was sent before, which no honest host repeats."""
        known, self._challenge = self._challenge == message.nonce, message.nonce
        return known
