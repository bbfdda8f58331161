"""An engine replica of a Ray Serve application: one engine process, its KV events, and its messages as bytes.

Arguments and results are msgpack frames (`api.messages`); Ray carries them between processes.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from bifolio.api import messages as m
from bifolio.config.transfer import Address, BlockSource, TransferSettings
from bifolio.errors import EngineDeadError, EngineFaultError, FaultKind
from bifolio.serve.process.supervisor import EngineProcess

logger = logging.getLogger(__name__)
UNHEALTHY_SECONDS = 60.0  # without a ready engine: Ray replaces the replica
_encoder = msgspec.msgpack.Encoder()
_starts = msgspec.msgpack.Decoder(m.Start)
_embeds = msgspec.msgpack.Decoder(m.Embed)


class EngineReplica:
    """The deployment class of engines."""

    async def __init__(  # type: ignore[misc]
        self, options: dict[str, Any], step_timeout: float = 300.0, role: str = "both", prefill_threshold: int = 64
    ) -> None:
        from ray import serve
        from ray.util import get_node_ip_address

        address = get_node_ip_address()
        self._name = serve.get_replica_context().replica_id.to_full_id_str()
        ports = free_ports(3)
        settings = m.KvEventSettings(f"tcp://{address}:{ports[0]}", f"tcp://{address}:{ports[1]}")
        self._endpoints = [settings.endpoint, settings.replay_endpoint]
        self._blocks = BlockSource(Address(address, ports[2]), secrets.token_hex(16)) if role == "prefill" else None
        transfer = transfer_of(role, self._blocks, prefill_threshold)
        launch = m.Launch(options, kv_events=settings, transfer=transfer)
        self._engine = EngineProcess(launch, step_timeout=step_timeout)
        self._readiness = Readiness(self._engine)
        await self._engine.start()

    # -- for Ray -----------------------------------------------------------------------------------------------------
    def record_replica_metadata(self) -> dict[str, Any]:
        """The addresses of KV events and blocks, for the routers; an engine that is restarted keeps them."""
        return {"kv_events": self._endpoints, "blocks": "" if self._blocks is None else str(self._blocks)}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The numbers that `cluster.autoscaling` reads."""
        stats, hello = self._engine.stats, self._engine.hello
        return {
            "waiting": stats.get("num_waiting", 0.0),
            "running": stats.get("num_running", 0.0),
            "slots": 0.0 if hello is None else float(hello.max_num_seqs),
        }

    def check_health(self) -> None:
        self._readiness.check()

    # -- for front ends ----------------------------------------------------------------------------------------------
    async def generate(self, start: bytes, *route: Any) -> AsyncIterator[bytes]:
        """The name of this replica, then the updates of one request; a refusal is its last message."""
        yield self._name.encode()
        request = _starts.decode(start)
        try:
            stream = self._engine.submit([request])
        except EngineFaultError as fault:
            yield _encoder.encode(m.Refused(request.id, fault.kind, str(fault)))
            return
        try:
            while updates := await stream.next():
                yield _encoder.encode(m.Updates(updates))
        except EngineFaultError as fault:
            yield _encoder.encode(m.Refused(request.id, fault.kind, str(fault)))
        finally:
            stream.close()  # a cancelled call aborts the request

    async def stop_completion(self, request_id: str, index: int, stop_reason: str, *route: Any) -> None:
        if self._is_meant(route):
            self._engine.stop(request_id, index, stop_reason)

    async def embed(self, request: bytes, *route: Any) -> bytes:
        """The vector, or a refusal."""
        asked = _embeds.decode(request)
        try:
            return _encoder.encode(m.Embedding("", await self._engine.embed(asked.token_ids, asked.pooling)))
        except EngineFaultError as fault:
            return _encoder.encode(m.Refused("", fault.kind, str(fault)))

    async def snapshot(self, *route: Any) -> bytes:
        try:
            return _encoder.encode(await self._engine.snapshot())
        except EngineFaultError as fault:
            return _encoder.encode(m.Refused("", fault.kind, str(fault)))

    async def describe(self, *route: Any) -> bytes:
        """The sizes of the engine, waiting until it is ready."""
        return _encoder.encode(self._engine.hello or await self._engine.start())

    async def report(self, *route: Any) -> bytes:
        """The counters of the last heartbeat."""
        if not self._is_meant(route):
            return _encoder.encode(m.Refused("", FaultKind.LOST, "the replica is gone"))
        return _encoder.encode(m.Beat(self._engine.stats, self._engine.health().step_seconds))

    def _is_meant(self, route: tuple[Any, ...]) -> bool:
        """Whether a call names this replica or none."""
        return not route or route[-1] in ("", self._name)


class Readiness:
    """Ends a replica whose engine does not come back; its supervisor restarts an engine that ends or hangs."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._last_ready = time.monotonic()

    def check(self) -> None:
        now = time.monotonic()
        if self._engine.health().is_ready:
            self._last_ready = now
        elif now - self._last_ready > UNHEALTHY_SECONDS:
            raise EngineDeadError(f"the engine has not been ready for {UNHEALTHY_SECONDS:.0f} s: see its log")


def transfer_of(role: str, blocks: BlockSource | None, threshold: int) -> TransferSettings | None:
    """The part of a replica in transfers of blocks; None: it computes prompts and decodes, and takes part in none."""
    if blocks is not None:
        (host, port), secret = blocks
        return TransferSettings("prefill", host, port, secret=secret)
    return TransferSettings(role, threshold=threshold, is_routed=True) if role == "decode" else None


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
