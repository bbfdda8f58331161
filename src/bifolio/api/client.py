"""`EngineClient`: an engine as its users see it, wherever it runs.

    in this process      serve.process.local_engine.LocalEngine       a thread
    in a child process   serve.process.supervisor.EngineProcess       restarted when it ends or hangs
    on another host      serve.process.remote_engine.RemoteEngine     TCP, a shared secret
    in a cluster         cluster.replica_engine.ReplicaEngine         one of several replicas, chosen for each request

The front end knows this protocol alone. Clients live on one event loop. Requests and updates are the messages of
`api.messages`; every failure is an `EngineFaultError` with a `FaultKind`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from bifolio.api.messages import (
    AdapterInfo,
    BranchCall,
    BranchReply,
    Control,
    Controlled,
    Hello,
    Picture,
    Pooling,
    Recalled,
    Start,
)
from bifolio.api.update_stream import UpdateStream


class EngineState(StrEnum):
    """The life of an engine behind a client."""

    STARTING = "starting"  # requests get `FaultKind.UNAVAILABLE`
    READY = "ready"
    SILENT = "silent"  # it has been ready and sends no heartbeats
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Health:
    """The state of an engine at one moment."""

    state: EngineState
    num_restarts: int = 0
    step_seconds: float = 0.0  # how long the present step has been running, as of the last heartbeat

    @property
    def is_ready(self) -> bool:
        return self.state is EngineState.READY


class EngineClient(Protocol):
    """Hands requests to an engine and its output to their streams."""

    @property
    def hello(self) -> Hello | None:
        """The sizes of the engine that is ready; None while there is none."""
        ...

    @property
    def adapters(self) -> Sequence[AdapterInfo]:
        """The low-rank adapters of the engine, as of the last heartbeat."""
        ...

    @property
    def num_open(self) -> int:
        """Requests that have not ended, embeddings included."""
        ...

    @property
    def num_restarts(self) -> int:
        """Times that the engine was replaced."""
        ...

    @property
    def stats(self) -> Mapping[str, float]:
        """The counters of the last heartbeat; empty while no engine is ready."""
        ...

    def counter(self, name: str) -> float:
        """A counter over all engines so far; it never goes back."""
        ...

    async def start(self) -> Hello:
        """Wait until the engine is ready. `ConfigError`: a setting or file that no restart will change."""
        ...

    def health(self) -> Health:
        """The state as of the last heartbeat."""
        ...

    def new_id(self) -> str:
        """An id for a request, unique across processes and hosts."""
        ...

    def submit(self, requests: Sequence[Start]) -> UpdateStream:
        """Hand requests to the engine; close the stream when done with them."""
        ...

    def abort(self, request_ids: list[str]) -> None:
        """End requests before the next step; no update of them follows."""
        ...

    def stop(self, request_id: str, index: int, stop_reason: str) -> None:
        """End one completion of a request, in which a stop text was found."""
        ...

    async def embed(self, token_ids: list[int], pooling: Pooling | None = None) -> bytes:
        """f32[d] as bytes; of other tasks f32[tokens, d], or f32[labels]."""
        ...

    async def snapshot(self) -> Picture:
        """Slots, queue and blocks at one moment."""
        ...

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
        ...

    async def recall(
        self, name: str, owner: str, *, drops: bool = False, share: str = "", salt: bytes = b""
    ) -> Recalled:
        """A stored conversation of this owner; with an empty body if there is none."""
        ...

    async def adapt(self, name: str, path: str = "", *, in_place: bool = False) -> None:
        """Load an adapter, or forget its name where there is no path; other requests go on."""
        ...

    async def scale_adapters(self, scales: dict[str, float]) -> None:
        """Set the factors of the adapters in requests that name none; those of others are 0."""
        ...

    async def branch(self, call: BranchCall) -> BranchReply:
        """Run a verb on a branch; its id is set here."""
        ...

    async def control(self, control: Control) -> Controlled:
        """Pause, resume, update the engine or let it sleep; its state afterwards."""
        ...

    def fail_all(self, error: Exception) -> None:
        """End every request that is in flight with this error."""
        ...

    async def close(self) -> None:
        """End the engine, or leave it if others use it; requests in flight are aborted."""
        ...


def new_prefix() -> str:
    """The first part of the ids of one client: 64 random bits, so that ids of any two hosts differ."""
    return secrets.token_hex(8)
