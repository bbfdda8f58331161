"""`bifolio serve`: an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from bifolio.cli import commands, early_worker, options, output_files
from bifolio.cli.serve_several import SeveralOptions

if TYPE_CHECKING:
    from bifolio.api.messages import KvEventSettings, SnapshotSettings
    from bifolio.config.transfer import TransferSettings
    from bifolio.serve.http.server import ServerSettings

HELP = """Serve a model over HTTP, as OpenAI's clients expect it.

The page at / has a playground and a live view of the KV cache."""
EPILOG = """Examples:

  bifolio serve

  bifolio serve -m ./SmolLM2-135M-Instruct.gguf --port 8080 --api-key-file keys.txt

  bifolio serve -m ./model --lora-modules poems=./adapter-of-poems

  bifolio serve -m smollm2 -m ./qwen.gguf --models-memory 8GB --keep smollm2"""


def register(app: commands.App) -> None:
    app.command(help=HELP, epilog=EPILOG)(serve)


@dataclass(frozen=True)
class ServerOptions:
    """The options of the HTTP server, in front of the engine."""

    HEADING: ClassVar[str] = "server"

    host: Annotated[str, commands.option("--host", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, commands.option("--port", "-p", min=0, max=65535, help="Port to listen on; 0: a free one.")
    ] = 8000
    name: Annotated[str | None, commands.option("--served-model-name", help="Name of the model in requests.")] = None
    api_key: Annotated[list[str] | None, commands.option("--api-key", help="Accepted API key; repeatable.")] = None
    api_key_file: Annotated[
        list[Path] | None, commands.option("--api-key-file", help="File of accepted API keys, one a line; repeatable.")
    ] = None
    admin_key_file: Annotated[
        list[Path] | None,
        commands.option(
            "--admin-key-file", help="File of keys that may load and unload adapters; repeatable.", advanced=True
        ),
    ] = None
    tls_cert: Annotated[Path | None, commands.option("--tls-cert", help="Certificate chain (PEM).")] = None
    tls_key: Annotated[Path | None, commands.option("--tls-key", help="Private key of the certificate (PEM).")] = None
    cors_origin: Annotated[
        list[str] | None,
        commands.option("--cors-origin", help="Origin that may call the API from a browser; repeatable."),
    ] = None
    max_queue: Annotated[
        int,
        commands.option(
            "--max-queue", help="Largest number of waiting requests; others get status 429.", advanced=True
        ),
    ] = 256
    max_open_per_key: Annotated[
        int | None,
        commands.option(
            "--max-open-per-key", help="Largest number of requests in flight for one API key.", advanced=True
        ),
    ] = None
    request_timeout: Annotated[
        float, commands.option("--request-timeout", help="Longest duration of a request, in seconds.", advanced=True)
    ] = 600.0
    drain_timeout: Annotated[
        float, commands.option("--drain-timeout", help="Seconds that open requests get after SIGTERM.", advanced=True)
    ] = 30.0
    max_body: Annotated[str, commands.option("--max-body", help="Largest request, such as 4MB.", advanced=True)] = (
        "4MiB"
    )
    step_timeout: Annotated[
        float,
        commands.option(
            "--step-timeout",
            help="Seconds after which a step counts as hung and the engine is restarted.",
            advanced=True,
        ),
    ] = 300.0
    heartbeat_timeout: Annotated[
        float,
        commands.option(
            "--heartbeat-timeout", help="Seconds without a sign of the engine until /ready fails.", advanced=True
        ),
    ] = 10.0
    allowed_host: Annotated[
        list[str] | None,
        commands.option(
            "--allowed-host", help="Another host name of a local server without keys; repeatable.", advanced=True
        ),
    ] = None
    front_ends: Annotated[
        int | None,
        commands.option(
            "--front-ends", min=1, help="Processes that serve HTTP; default: 2 from 8 cores on, else 1.", advanced=True
        ),
    ] = None
    engine: Annotated[
        str | None,
        commands.option(
            "--engine", help="HOST:PORT of a running `bifolio engine`; default: an engine process here.", advanced=True
        ),
    ] = None
    engine_secret_file: Annotated[
        Path | None,
        commands.option("--engine-secret-file", help="File of the secret shared with that engine.", advanced=True),
    ] = None
    replicas: Annotated[
        int,
        commands.option(
            "--replicas", min=1, help="Engines on this machine, behind Ray Serve when there are several.", advanced=True
        ),
    ] = 1
    prefill_replicas: Annotated[
        int,
        commands.option(
            "--prefill-replicas", min=0, help="Further engines that compute prompts; --replicas decode.", advanced=True
        ),
    ] = 0
    metrics_compat: Annotated[
        str | None,
        commands.option(
            "--metrics-compat", help="'vllm': metrics also under vLLM's names, for gateways.", advanced=True
        ),
    ] = None
    kv_events: Annotated[
        str | None,
        commands.option(
            "--kv-events", help="Address to publish KV events on, such as tcp://127.0.0.1:5557.", advanced=True
        ),
    ] = None
    kv_events_replay: Annotated[
        str | None,
        commands.option(
            "--kv-events-replay", help="Address that replays them; default: the port after --kv-events.", advanced=True
        ),
    ] = None
    kv_events_topic: Annotated[
        str, commands.option("--kv-events-topic", help="Topic of the KV events.", advanced=True)
    ] = ""
    snapshot_dir: Annotated[
        Path | None,
        commands.option(
            "--snapshot-dir", help="Folder of clients' snapshots; default: in --kv-offload-dir, if that is given."
        ),
    ] = None
    snapshot_bytes: Annotated[
        str, commands.option("--snapshot-bytes", help="The most bytes of one key's snapshots.", advanced=True)
    ] = "8GiB"
    role: Annotated[
        str,
        commands.option(
            "--role", help="Part of two engines that share the work: prefill or decode; both: one.", advanced=True
        ),
    ] = "both"
    transfer_host: Annotated[
        str,
        commands.option(
            "--transfer-host", help="Address on which --role prefill serves blocks of its cache.", advanced=True
        ),
    ] = "127.0.0.1"
    transfer_port: Annotated[
        int, commands.option("--transfer-port", min=0, help="Port of the blocks; 0: a free one.", advanced=True)
    ] = 0
    transfer_secret_file: Annotated[
        Path | None,
        commands.option("--transfer-secret-file", help="File of the secret shared by both roles.", advanced=True),
    ] = None
    prefill_address: Annotated[
        list[str] | None,
        commands.option(
            "--prefill-address", help="HOST:PORT of a server with --role prefill; repeatable.", advanced=True
        ),
    ] = None
    prefill_threshold: Annotated[
        int,
        commands.option(
            "--prefill-threshold", min=1, help="Shortest prompt that is computed there, in tokens.", advanced=True
        ),
    ] = 64
    allow_image_urls: Annotated[
        list[str] | None,
        commands.option(
            "--allow-image-urls",
            help="HOST or HOST:PORT whose images requests may name by http(s) URLs; repeatable.",
            advanced=True,
        ),
    ] = None
    allow_pull: Annotated[
        bool,
        commands.option("--allow-pull", help="Clients may fetch models into the cache (/api/pull).", advanced=True),
    ] = False
    allow_updates: Annotated[
        bool,
        commands.option(
            "--allow-updates", help="Clients may pause the engine and load other weights from a folder.", advanced=True
        ),
    ] = False
    log_prompts: Annotated[
        bool, commands.option("--log-prompts", help="Write prompts into the log.", advanced=True)
    ] = False
    allow_priority: Annotated[
        bool,
        commands.option("--allow-priority", help="Priorities of requests count even without API keys.", advanced=True),
    ] = False
    receipts: Annotated[
        Path | None,
        commands.option(
            "--receipts", read=output_files.output_folder, help="Folder that gets the receipt of every answer."
        ),
    ] = None
    log_level: Annotated[str, commands.option("--log-level", help="debug, info, warning or error.")] = "info"

    def settings(self) -> ServerSettings:
        from bifolio.engine.memory import parse_bytes
        from bifolio.serve.http.auth import read_keys
        from bifolio.serve.http.context import Limits
        from bifolio.serve.http.fetched_images import checked_hosts
        from bifolio.serve.http.server import ServerSettings, default_front_ends

        return ServerSettings(
            host=self.host,
            port=self.port,
            model_name=self.name,
            keys=read_keys(self.api_key or [], self.api_key_file or []),
            admin_keys=read_keys([], self.admin_key_file or []),
            cors_origins=self.cors_origin or [],
            tls_certificate=self.tls_cert,
            tls_key=self.tls_key,
            limits=Limits(
                max_body_bytes=parse_bytes(self.max_body),
                image_hosts=checked_hosts(self.allow_image_urls or []),
                max_queue=self.max_queue,
                max_open_per_key=self.max_open_per_key,
                request_timeout=self.request_timeout,
            ),
            drain_seconds=self.drain_timeout,
            step_timeout=self.step_timeout,
            heartbeat_timeout=self.heartbeat_timeout,
            allowed_hosts=self.allowed_host or [],
            engine_address=self.engine,
            engine_secret=self._secret(),
            metrics_compat=self._compat(),
            kv_events=self._kv_events(),
            transfer=self._transfer(),
            snapshots=self._snapshots(parse_bytes(self.snapshot_bytes)),
            log_prompts=self.log_prompts,
            allow_pull=self.allow_pull,
            allow_updates=self.allow_updates,
            allow_priority=self.allow_priority,
            receipts=self.receipts,
            front_ends=self.front_ends or (default_front_ends() if self.engine is None else 1),
        )

    def _snapshots(self, max_bytes: int) -> SnapshotSettings:
        from bifolio.api.messages import SnapshotSettings

        return SnapshotSettings("" if self.snapshot_dir is None else str(self.snapshot_dir), max_bytes)

    def _transfer(self) -> TransferSettings:
        from bifolio.config.transfer import TransferSettings
        from bifolio.serve.http.auth import read_keys

        secret = "" if self.transfer_secret_file is None else read_keys([], [self.transfer_secret_file])[0]
        addresses = tuple(self.prefill_address or ())
        return TransferSettings(
            self.role, self.transfer_host, self.transfer_port, addresses, secret, self.prefill_threshold
        )

    def _compat(self) -> str | None:
        if self.metrics_compat not in (None, "vllm"):
            raise commands.BadParameter(f"--metrics-compat takes 'vllm', not {self.metrics_compat!r}")
        return self.metrics_compat

    def _kv_events(self) -> KvEventSettings | None:
        from bifolio.api.messages import KvEventSettings

        if self.kv_events is None:
            return None
        base, _, port = self.kv_events.rpartition(":")
        replay = self.kv_events_replay
        if replay is None:
            if not port.isdigit():
                raise commands.BadParameter(
                    f"--kv-events takes an address such as tcp://*:5557, not {self.kv_events!r}"
                )
            replay = f"{base}:{int(port) + 1}"
        return KvEventSettings(self.kv_events, replay, self.kv_events_topic)

    def _secret(self) -> bytes:
        from bifolio.errors import ConfigError
        from bifolio.serve.process.handshake import read_secret

        if (self.engine is None) != (self.engine_secret_file is None):
            raise ConfigError("--engine and --engine-secret-file go together: pass both or none")
        if self.engine is not None and (self.front_ends or 1) > 1:
            raise ConfigError("--front-ends needs an engine process of its own: start several servers on one --engine")
        return b"" if self.engine_secret_file is None else read_secret(self.engine_secret_file)


def serve(
    server: ServerOptions,
    engine: options.BatchEngine,
    adapters: options.Adapters,
    several: SeveralOptions,
    models: Annotated[
        list[str] | None,
        commands.option(
            "--model", "-m", help="A model folder, a .gguf file, or a model's name; repeatable: several models."
        ),
    ] = None,
) -> None:
    import os

    from bifolio.cli.serve_checks import check_combined
    from bifolio.errors import ConfigError, MissingDependencyError

    check_combined(server, engine, adapters)
    os.environ["BIFOLIO_LOG_LEVEL"] = server.log_level
    worker = early_worker.start(server, several, models or [])  # before the slow imports
    import asyncio

    try:
        from bifolio.serve.http.context import public_name
        from bifolio.serve.http.server import event_loop
        from bifolio.serve.http.server import serve as run_server
        from bifolio.serve.views.logs import LEVELS, configure_logging
    except ImportError as error:
        raise MissingDependencyError(f"the server needs {error.name}: pip install 'bifolio[serve]'") from error
    modules, model = adapters.for_llm()["lora_modules"], models[0] if models else None
    if (own_name := public_name(model, server.name)) in modules:
        raise ConfigError(f"--lora-modules names {own_name!r}, the name of the model: choose another")
    if server.log_level not in LEVELS:
        raise ConfigError(f"--log-level is one of {', '.join(LEVELS)}, not {server.log_level!r}")
    configure_logging(server.log_level, "front")
    wanted = several.settings(models or [], server, engine)
    if wanted is not None and adapters != options.Adapters():
        raise ConfigError("adapters (--lora-modules and the like) are served beside one model: pass one --model")
    if server.replicas > 1 or server.prefill_replicas:
        serve_replicas(server, engine, adapters, model)
        return
    engine_options = {"model": model, **engine.for_llm(), **adapters.for_llm()}
    if engine_options["speculative"] is not None:
        engine_options["speculative"] = asdict(engine_options["speculative"])  # it is sent to the engine's process
    with asyncio.Runner(loop_factory=event_loop()) as runner:
        if wanted is None:
            runner.run(run_server(server.settings(), engine_options, worker))
        else:
            from bifolio.serve.several.server import serve_several

            runner.run(serve_several(server.settings(), wanted, engine_options))


def serve_replicas(
    server: ServerOptions, engine: options.BatchEngine, adapters: options.Adapters, model: str | None
) -> None:
    """Several engines on this machine; they divide its cores."""
    import os
    from dataclasses import replace

    from bifolio.cli.cluster import Replicas, plain_options, ray_module
    from bifolio.serve.http.listening import reserve

    settings = server.settings()
    for each in reserve(settings.host, settings.port):  # told before the engines start
        each.close()
    run = ray_module()
    values = {**plain_options(engine), **adapters.for_llm()}
    if values.get("threads") is None:
        values["threads"] = max((os.cpu_count() or 1) // (server.replicas + server.prefill_replicas), 1)
    cluster = Replicas(replicas=server.replicas, prefill_replicas=server.prefill_replicas,
                       prefill_threshold=server.prefill_threshold, front_ends=server.front_ends or 1, name=server.name,
                       drain_timeout=server.drain_timeout, metrics_compat=settings.metrics_compat)  # fmt: skip
    wanted = replace(
        cluster.settings(model, values),
        keys=list(settings.keys),
        cors_origins=list(settings.cors_origins),
        max_queue=settings.limits.max_queue,
        request_timeout=settings.limits.request_timeout,
    )
    run.serve_locally(wanted, settings.host, settings.port)
