"""`bifolio cluster`: replicas on a running Ray cluster."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from bifolio.cli import commands, options

if TYPE_CHECKING:
    from bifolio.cluster.application import ClusterSettings

HELP = "Serve from engines on several machines, with Ray Serve."
DEPLOY_HELP = """Start the application on a running Ray cluster, or update it replica by replica.

Every engine is a replica; requests go to the replica that has their prefix cached and little work."""
DEPLOY_EPILOG = """Examples:

  bifolio cluster deploy -m Qwen/Qwen3-8B --replicas 4 --num-gpus 1

  bifolio cluster deploy -m ./model.gguf --replicas 1 --max-replicas 8 --num-cpus 8

  bifolio cluster deploy -m Qwen/Qwen3-8B --prefill-replicas 2 --replicas 4 --num-gpus 1"""


@dataclass(frozen=True)
class Replicas:
    """Engines and the resources of each."""

    HEADING: ClassVar[str] = "replicas"

    replicas: Annotated[int, commands.option("--replicas", min=1, help="Engines, at the start.")] = 1
    max_replicas: Annotated[
        int | None, commands.option("--max-replicas", min=1, help="Most engines: adds some while requests wait.")
    ] = None
    min_replicas: Annotated[
        int, commands.option("--min-replicas", min=1, help="Fewest engines, with --max-replicas.")
    ] = 1
    prefill_replicas: Annotated[
        int, commands.option("--prefill-replicas", min=0, help="Engines that compute prompts; --replicas decode then.")
    ] = 0
    prefill_threshold: Annotated[
        int, commands.option("--prefill-threshold", min=1, help="Shortest prompt that is computed there, in tokens.")
    ] = 64
    front_ends: Annotated[int, commands.option("--front-ends", min=1, help="Processes that serve HTTP.")] = 1
    num_cpus: Annotated[float, commands.option("--num-cpus", min=0, help="CPUs of each engine.")] = 1.0
    num_gpus: Annotated[float, commands.option("--num-gpus", min=0, help="GPUs of each engine.")] = 0.0
    drain_timeout: Annotated[
        float, commands.option("--drain-timeout", help="Seconds that open requests get when a replica is replaced.")
    ] = 30.0
    name: Annotated[str | None, commands.option("--served-model-name", help="Name of the model in requests.")] = None
    api_key_file: Annotated[
        list[Path] | None, commands.option("--api-key-file", help="File of accepted API keys, one a line; repeatable.")
    ] = None
    metrics_compat: Annotated[
        str | None, commands.option("--metrics-compat", help="'vllm': metrics also under vLLM's names, for gateways.")
    ] = None

    def settings(self, model: str | None, engine: dict[str, Any]) -> ClusterSettings:
        from bifolio.cluster.application import ClusterSettings
        from bifolio.serve.http.auth import read_keys

        return ClusterSettings(
            model=model,
            model_name=self.name,
            replicas=self.replicas,
            max_replicas=self.max_replicas,
            min_replicas=self.min_replicas,
            prefill_replicas=self.prefill_replicas,
            prefill_threshold=self.prefill_threshold,
            front_ends=self.front_ends,
            num_cpus=self.num_cpus,
            num_gpus=self.num_gpus,
            drain_seconds=self.drain_timeout,
            keys=list(read_keys([], self.api_key_file or [])),
            metrics_compat=self.metrics_compat,
            engine=engine,
        )


Address = Annotated[str, commands.option("--address", help="Address of the Ray cluster.", variable="RAY_ADDRESS")]


def register(app: commands.App) -> None:
    cluster = commands.App("cluster", HELP)
    cluster.command("deploy", help=DEPLOY_HELP, epilog=DEPLOY_EPILOG)(deploy)
    cluster.command("status", help="Show the state of the application and its replicas.")(status)
    cluster.command("delete", help="End the application after its requests.")(delete)
    app.add_app(cluster)


def deploy(
    replicas: Replicas,
    engine: options.BatchEngine,
    model: options.Model = None,
    address: Address = "auto",
    host: Annotated[str, commands.option("--host", help="Address of each node to listen on.")] = "127.0.0.1",
    port: Annotated[int, commands.option("--port", "-p", min=0, max=65535, help="Port to listen on.")] = 8000,
) -> None:
    run = ray_module()
    settings = replicas.settings(model, plain_options(engine))
    run.connect(address)
    run.deploy(settings, host, port)
    count = settings.prefill_replicas
    engines = f"{count} prefill and {settings.replicas} decode replicas" if count else f"{settings.replicas} replicas"
    commands.echo(f"http://{host}:{port} serves from {engines}")


def status(
    address: Address = "auto",
    as_json: Annotated[bool, commands.option("--json", help="Print JSON.")] = False,
) -> None:
    run = ray_module()
    run.connect(address)
    found = run.status()
    if as_json:
        commands.echo(json.dumps(found))
        return
    commands.echo(f"application {found['status']} {found['message']}".rstrip())
    for name, one in found["deployments"].items():
        states = ", ".join(f"{count} {state}" for state, count in one["replicas"].items())
        commands.echo(f"{name:<12} {one['status']}: {states} {one['message']}".rstrip())


def delete(address: Address = "auto") -> None:
    run = ray_module()
    run.connect(address)
    run.delete()


def ray_module() -> Any:
    """`bifolio.cluster.run`, or a sentence that says which packages it needs."""
    from bifolio.errors import MissingDependencyError

    try:
        from bifolio.cluster import run
    except ImportError as error:
        raise MissingDependencyError(f"several replicas need {error.name}: pip install 'bifolio[cluster]'") from error
    return run


def plain_options(engine: options.BatchEngine) -> dict[str, Any]:
    """The engine's options as plain values, which are sent to other machines."""
    values = engine.for_llm()
    if values["speculative"] is not None:
        values["speculative"] = asdict(values["speculative"])
    return values
