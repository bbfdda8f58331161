"""Starting and stopping: one engine process, and one or more front ends."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn

from bifolio.api.client import EngineClient
from bifolio.api.messages import KvEventSettings, Launch, SnapshotSettings
from bifolio.config.transfer import TransferSettings
from bifolio.errors import ConfigError
from bifolio.model.loaded import TextModel
from bifolio.model.loader import open_text_model
from bifolio.serve.helpers.allocator import return_large_blocks, trim_now_and_then
from bifolio.serve.helpers.branch_messages import Serve
from bifolio.serve.helpers.branches import Branches, encode_settings
from bifolio.serve.http.auth import App, KeyRing, kept_secret, new_secret
from bifolio.serve.http.connection import Connections, allow_files
from bifolio.serve.http.context import Limits, ServerContext, public_name
from bifolio.serve.http.errors import ApiError
from bifolio.serve.http.hosts import is_loopback
from bifolio.serve.http.listening import check_certificate, reserve
from bifolio.serve.http.receipt_files import ReceiptFiles
from bifolio.serve.http.tls_doors import TlsDoors, tls_context
from bifolio.serve.process.supervisor import EngineProcess
from bifolio.serve.process.worker_process import StartedWorker
from bifolio.serve.views.vllm_metrics import with_vllm_names

logger = logging.getLogger(__name__)
SNAPSHOT_BYTES = 8 << 30  # of each key


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything about a server but the engine's own options."""

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None  # as clients see it
    keys: Sequence[str] = ()
    admin_keys: Sequence[str] = ()  # of the paths that change the server; none: those are closed
    cors_origins: Sequence[str] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    limits: Limits = field(default_factory=Limits)
    allowed_hosts: Sequence[str] = ()  # further names that a server without keys on the loopback interface answers to
    max_connections: int = 2048
    max_connections_per_address: int = 1024  # and of one key; the others stay free for other clients
    drain_seconds: float = 30.0  # that requests in flight get when the server is told to stop
    step_timeout: float = 300.0  # seconds; a longer step means a hung engine
    heartbeat_timeout: float = 10.0  # seconds without a heartbeat of the engine until `/ready` answers 503
    max_updates_per_second: float | None = None  # events of all streams together, about; None: by the device
    log_prompts: bool = False
    allow_pull: bool = False  # clients may fetch models into the cache
    allow_updates: bool = False  # clients may pause the engine and give it other weights
    allow_priority: bool = False  # priorities of clients without keys count
    receipts: Path | None = None  # folder of the receipts of all answers
    worker_command: Sequence[str] | None = None
    starts_gently: bool = False  # other engines of the machine go first while this one starts
    front_ends: int = 1  # processes that listen on the port
    engine_address: str | None = None  # HOST:PORT of an engine on another host; None: an engine process of this one
    engine_secret: bytes = b""  # shared with the engine on another host
    in_process: bool = False  # the engine runs on a thread of the front end
    kv_events: KvEventSettings | None = None  # where the engine publishes stored and removed blocks
    transfer: TransferSettings | None = None  # prefill and decode on separate engines
    snapshots: SnapshotSettings = field(default_factory=lambda: SnapshotSettings("", SNAPSHOT_BYTES))  # of clients
    metrics_compat: str | None = None  # "vllm": metrics also under vLLM's names


@dataclass(frozen=True, slots=True)
class BranchSettings:
    """The settings of a further front end (`serve.helpers.branch`)."""

    server: ServerSettings
    reference: str  # the model
    mmproj: str | None  # its tower, as of `load_model`
    name: str  # as clients see it
    created: int
    num_front_ends: int


class Requests(Protocol):
    """The requests of one engine, or of several."""

    @property
    def num_open(self) -> int: ...

    def fail_all(self, error: Exception) -> None: ...


class Served(Protocol):
    """The state behind an application, as its server reads it: `ServerContext`, or that of several models."""

    draining: bool
    name: str

    @property
    def engine(self) -> Requests: ...

    def begin_drain(self) -> None: ...


class Server(uvicorn.Server):
    """Uvicorn, with a drain: on SIGTERM requests in flight are finished, within a time limit."""

    def __init__(
        self, config: uvicorn.Config, context: Served, drain_seconds: float, doors: TlsDoors | None = None
    ) -> None:
        super().__init__(config)
        self._context = context
        self._doors = doors  # None: without TLS
        self._drain_seconds = drain_seconds
        self.address: str | None = None  # for the log, once the port is bound
        self._trimming: asyncio.Task[None] | None = None

    async def startup(self, sockets: Any = None) -> None:
        self._trimming = asyncio.create_task(trim_now_and_then())
        if self._doors is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            self._doors.listen(sockets, self._new_protocol)
            self.servers.append(self._doors)  # type: ignore[arg-type]
        if self.started and self.address is not None:
            logger.info("serving", extra={"address": self.address, "model": self._context.name})

    def _new_protocol(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's own: it would raise the signal again after the drain, before the engine is closed."""
        if self._context.draining and sig == signal.SIGINT:
            self._context.engine.fail_all(stopped())  # a second Ctrl-C does not wait
            self.force_exit = True
        self.begin_drain()

    def begin_drain(self) -> None:
        """Refuse new requests; requests in flight finish."""
        self._context.begin_drain()
        self.should_exit = True

    async def shutdown(self, sockets: Any = None) -> None:
        logger.info("draining", extra={"open_requests": self._context.engine.num_open})
        if self._trimming is not None:
            self._trimming.cancel()
        limit = asyncio.create_task(self._end_drain())
        await super().shutdown(sockets)
        limit.cancel()

    async def _end_drain(self) -> None:
        end = time.monotonic() + self._drain_seconds
        while self._context.engine.num_open and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self._context.engine.fail_all(stopped())


def stopped() -> ApiError:
    return ApiError(503, "the server was stopped before the request ended", "shutting_down", retry_after=5)


@contextlib.asynccontextmanager
async def running_context(
    settings: ServerSettings, engine_options: dict[str, Any], worker: StartedWorker | None = None
) -> AsyncIterator[ServerContext]:
    """A loaded tokenizer and a ready engine process, which alone reads the weights."""
    from bifolio.model.registry import DEFAULT_MODEL

    reference = engine_options.get("model") or DEFAULT_MODEL
    mmproj = engine_options.get("mmproj")
    model = await asyncio.to_thread(open_text_model, reference, mmproj)
    launch = Launch({**engine_options, "model": str(reference)}, settings.max_updates_per_second, settings.kv_events,
                    settings.transfer, snapshots_of(settings, engine_options))  # fmt: skip
    engine = make_engine(settings, launch, worker)
    try:
        await asyncio.gather(engine.start(), asyncio.to_thread(_prepare, model))
        name = public_name(reference, settings.model_name)
        context = ServerContext(
            model, engine, name, settings.limits, log_prompts=settings.log_prompts, reference=str(reference),
            mmproj=mmproj, allow_pull=settings.allow_pull, allow_updates=settings.allow_updates,
            allow_priority=settings.allow_priority, receipts=ReceiptFiles.of(settings.receipts),
        )  # fmt: skip
        if settings.metrics_compat is not None:
            context.metrics.extend = with_vllm_names(name, lambda: engine.hello)
        try:
            yield context
        finally:
            await context.close()
    finally:
        await engine.close()


def _prepare(model: TextModel) -> None:
    """The work of a front end that needs no engine."""
    importlib.import_module("bifolio.serve.http.app")
    _ = model.tokenizer


def make_engine(settings: ServerSettings, launch: Launch, worker: StartedWorker | None = None) -> EngineClient:
    """A client of the engine: a child process, a thread of this process, or an engine on another host."""
    if settings.engine_address is not None:
        from bifolio.serve.process.remote_engine import RemoteEngine

        timeout = settings.heartbeat_timeout
        return RemoteEngine(settings.engine_address, settings.engine_secret, heartbeat_timeout=timeout)
    if settings.in_process:
        from bifolio.serve.process.local_engine import LocalEngine

        return LocalEngine(launch, step_timeout=settings.step_timeout)
    return EngineProcess(
        launch,
        command=settings.worker_command,
        step_timeout=settings.step_timeout,
        heartbeat_timeout=settings.heartbeat_timeout,
        worker=worker,
        starts_gently=settings.starts_gently,
    )


def default_front_ends() -> int:
    """Two from eight cores on: the engine, its helpers and the clients of a smaller machine need the cores."""
    return 2 if (os.cpu_count() or 1) >= 8 else 1


def event_loop() -> Any:
    """The loop factory of uvloop where it is installed: it saves a third of the work of every event."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def make_server(
    settings: ServerSettings, context: ServerContext, num_front_ends: int = 1, secret: bytes | None = None
) -> Server:
    """The server of one of `num_front_ends` front ends, which share the limits on connections evenly."""
    from bifolio.serve.http.app import make_app  # read by `_prepare` while the engine starts

    keys = KeyRing(settings.keys, secret)
    app = make_app(context, keys, settings.cors_origins, answered_hosts(settings), KeyRing(settings.admin_keys))
    return new_server(settings, app, keys, context, num_front_ends)


def answered_hosts(settings: ServerSettings) -> list[str] | None:
    """The names that a server on the loopback interface answers to; None: any."""
    return [settings.host, *settings.allowed_hosts] if is_loopback(settings.host) else None


def new_server(settings: ServerSettings, app: App, keys: KeyRing, context: Served, num_front_ends: int = 1) -> Server:
    """The server of an application."""
    certificate, key = settings.tls_certificate, settings.tls_key
    check_certificate(certificate, key)
    connections = Connections(
        -(-settings.max_connections // num_front_ends), -(-settings.max_connections_per_address // num_front_ends)
    )
    doors = None if certificate is None or key is None else TlsDoors(tls_context(certificate, key), connections)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=_make_protocol(connections, keys),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        backlog=2048,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=int(settings.drain_seconds) + 5,
    )
    config.load()
    allow_files(settings.max_connections)
    return Server(config, context, settings.drain_seconds, doors)


async def serve(settings: ServerSettings, engine_options: dict[str, Any], worker: StartedWorker | None = None) -> None:
    """Serve until told to stop. The port and the certificate are checked before the model is loaded.

    `worker` is the engine's process, if it has been started already.
    """
    return_large_blocks()
    check_certificate(settings.tls_certificate, settings.tls_key)
    sockets = reserve(settings.host, settings.port, reuse_port=settings.front_ends > 1)
    settings = replace(settings, port=sockets[0].getsockname()[1])
    try:
        await _serve_on(sockets, settings, engine_options, worker)
    finally:
        for each in sockets:
            each.close()


async def _serve_on(
    sockets: list[socket.socket],
    settings: ServerSettings,
    engine_options: dict[str, Any],
    worker: StartedWorker | None,
) -> None:
    async with running_context(settings, engine_options, worker) as context:
        context.templates.begin()
        hello = context.engine.hello
        for line in [] if hello is None else hello.plan:
            logger.info("memory plan: %s", line)
        secret = secret_of(settings, engine_options)
        server = make_server(settings, context, settings.front_ends, secret)
        scheme = "https" if settings.tls_certificate else "http"
        server.address = f"{scheme}://{settings.host}:{settings.port}"
        if settings.front_ends == 1:
            await server.serve(sockets=sockets)
            return
        branches = start_branches(settings, context, secret)
        try:
            await server.serve(sockets=sockets)
        finally:
            await branches.close(0.0 if server.force_exit else settings.drain_seconds + 5)


def snapshots_of(settings: ServerSettings, engine_options: dict[str, Any]) -> SnapshotSettings | None:
    """Where snapshots are kept: in the folder of the settings, or beside the files of the tiers."""
    given, folder = settings.snapshots, engine_options.get("kv_offload_dir")
    if given.folder or folder is None:
        return given if given.folder else None
    return SnapshotSettings(str(Path(folder).expanduser() / "snapshots"), given.max_bytes)


def secret_of(settings: ServerSettings, engine_options: dict[str, Any]) -> bytes:
    """The secret behind the salts of keys: one for each start, or that of the files that outlive a start."""
    folder = engine_options.get("kv_offload_dir")
    if folder is None:
        folder = settings.snapshots.folder or None
    return new_secret() if folder is None else kept_secret(Path(folder).expanduser())


def start_branches(settings: ServerSettings, context: ServerContext, secret: bytes) -> Branches:
    """Start the further front ends."""
    engine = context.engine
    if not isinstance(engine, EngineProcess):
        raise ConfigError("only the front end that owns the engine process starts further ones")
    reference = context.reference or str(context.model.path)
    told = BranchSettings(settings, reference, context.mmproj, context.name, context.created, settings.front_ends)
    branches = Branches(
        engine, context.metrics, Serve(encode_settings(told), secret, ""), context.refusal, settings.front_ends - 1
    )
    engine.relay = context.branches = branches
    branches.start()
    return branches


def _make_protocol(connections: Connections, keys: KeyRing) -> Any:
    """A class for uvicorn's `http` setting."""
    try:
        from bifolio.serve.http.bounded_protocol import BoundedProtocol
    except ImportError:
        return "h11"  # slower; has a limit on the size of headers of its own
    return type("ServerProtocol", (BoundedProtocol,), {"open_connections": connections, "keys": keys})
