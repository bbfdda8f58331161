"""`bifolio serve`: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bifolio.cli import commands, options
from bifolio.config import NUMERICS

HELP = """Serve a model over HTTP, as OpenAI's clients expect it.

The page at / has a playground and a live view of the KV cache."""
EPILOG = """Examples:

  bifolio serve

  bifolio serve -m ./SmolLM2-135M-Instruct.gguf --port 8080 --api-key-file keys.txt"""


def register(app: commands.App) -> None:
    app.command(help=HELP, epilog=EPILOG)(serve)


def serve(
    model: options.Model = None,
    host: Annotated[str, commands.option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, commands.option("--port", "-p", help="Port to listen on.")] = 8000,
    name: Annotated[str | None, commands.option("--served-model-name", help="Name of the model in requests.")] = None,
    api_key: Annotated[list[str] | None, commands.option("--api-key", help="Accepted API key; repeatable.")] = None,
    api_key_file: Annotated[
        list[Path] | None, commands.option("--api-key-file", help="File of accepted API keys, one a line; repeatable.")
    ] = None,
    tls_cert: Annotated[Path | None, commands.option("--tls-cert", help="Certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, commands.option("--tls-key", help="Private key of the certificate (PEM).")] = None,
    cors_origin: Annotated[
        list[str] | None,
        commands.option("--cors-origin", help="Origin that may call the API from a browser; repeatable."),
    ] = None,
    max_queue: Annotated[
        int, commands.option("--max-queue", help="Largest number of waiting requests; others get status 429.")
    ] = 256,
    max_open_per_key: Annotated[
        int | None, commands.option("--max-open-per-key", help="Largest number of requests in flight for one API key.")
    ] = None,
    request_timeout: Annotated[
        float, commands.option("--request-timeout", help="Longest duration of a request, in seconds.")
    ] = 600.0,
    drain_timeout: Annotated[
        float, commands.option("--drain-timeout", help="Seconds that open requests get after SIGTERM.")
    ] = 30.0,
    max_body: Annotated[str, commands.option("--max-body", help="Largest request, such as 4MB.")] = "4MiB",
    step_timeout: Annotated[
        float,
        commands.option(
            "--step-timeout", help="Seconds after which a step counts as hung and the engine is restarted."
        ),
    ] = 300.0,
    heartbeat_timeout: Annotated[
        float, commands.option("--heartbeat-timeout", help="Seconds without a sign of the engine until /ready fails.")
    ] = 10.0,
    allowed_host: Annotated[
        list[str] | None,
        commands.option("--allowed-host", help="Another host name of a local server without keys; repeatable."),
    ] = None,
    front_ends: Annotated[
        int | None,
        commands.option("--front-ends", min=1, help="Processes that serve HTTP; default: 2 from 8 cores on, else 1."),
    ] = None,
    log_prompts: Annotated[bool, commands.option("--log-prompts", help="Write prompts into the log.")] = False,
    log_level: Annotated[str, commands.option("--log-level", help="debug, info, warning or error.")] = "info",
    speculative: options.Speculative = None,
    draft_model: options.DraftModel = None,
    memory: options.Memory = None,
    max_model_len: options.MaxModelLen = None,
    max_num_seqs: options.AnyNumSeqs = None,
    block_size: options.AnyBlockSize = None,
    chunk_size: options.AnyChunkSize = None,
    dtype: options.Dtype = "auto",
    kv_dtype: options.KvDtype = NUMERICS.kv_dtype,
    activations: options.Activations = NUMERICS.activations,
    threads: options.Threads = NUMERICS.threads,
    device: options.Device = NUMERICS.device,
    deterministic: options.Deterministic = NUMERICS.deterministic,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
) -> None:
    import asyncio
    import os
    from dataclasses import asdict

    from bifolio.errors import ConfigError, MissingDependencyError

    try:
        from bifolio.serve.auth import read_keys
        from bifolio.serve.context import Limits
        from bifolio.serve.logs import LEVELS, configure_logging
        from bifolio.serve.server import ServerSettings, default_front_ends, event_loop
        from bifolio.serve.server import serve as run_server
    except ImportError as error:
        raise MissingDependencyError(f"the server needs {error.name}: pip install 'bifolio[serve]'") from error
    from bifolio.engine.memory import parse_bytes

    if log_level not in LEVELS:
        raise ConfigError(f"--log-level is one of {', '.join(LEVELS)}, not {log_level!r}")
    os.environ["BIFOLIO_LOG_LEVEL"] = log_level
    configure_logging(log_level, "front")
    settings = ServerSettings(
        host=host,
        port=port,
        model_name=name,
        keys=read_keys(api_key or [], api_key_file or []),
        cors_origins=cors_origin or [],
        tls_certificate=tls_cert,
        tls_key=tls_key,
        limits=Limits(
            max_body_bytes=parse_bytes(max_body),
            max_queue=max_queue,
            max_open_per_key=max_open_per_key,
            request_timeout=request_timeout,
        ),
        drain_seconds=drain_timeout,
        step_timeout=step_timeout,
        heartbeat_timeout=heartbeat_timeout,
        allowed_hosts=allowed_host or [],
        log_prompts=log_prompts,
        front_ends=front_ends or default_front_ends(),
    )
    guessing = options.speculative_config(speculative, draft_model)
    engine_options = {
        "model": model,
        "dtype": dtype,
        "kv_cache_dtype": kv_dtype,
        "memory": memory,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "block_size": block_size,
        "chunk_size": chunk_size,
        "activations": activations,
        "threads": threads,
        "device": device,
        "deterministic": deterministic or None,
        "gpu_memory_utilization": gpu_memory_utilization,
        "speculative": None if guessing is None else asdict(guessing),
    }
    with asyncio.Runner(loop_factory=event_loop()) as runner:
        runner.run(run_server(settings, engine_options))
