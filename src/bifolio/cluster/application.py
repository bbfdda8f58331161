"""The Ray Serve application: front ends (`FrontEnd`) in front of engines (`EngineReplica`).

    client ── HTTP ──▶ Ray's proxy ──▶ FrontEnd ── router ──▶ EngineReplica ── socket pair ──▶ engine process
                                       FrontEnd ─────┴──────▶ EngineReplica ── socket pair ──▶ engine process
                                          ▲───── KV events (ZMQ) ────┘

With `prefill_replicas` the phases run on separate engines: the engines of `replicas` decode, and fetch the blocks of
prompts from engines that only prefill (`cluster.prefill_pool`).

    FrontEnd ── router ──▶ EngineReplica, decode ◀── blocks (TCP, shared memory) ── EngineReplica, prefill

`build` is the builder that a Serve config file names (`import_path: bifolio.cluster.application:build`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import Any

import msgspec
from ray import serve

from bifolio.cluster.replica import EngineReplica
from bifolio.errors import ConfigError, did_you_mean

ENGINES = "engines"
PREFILL_ENGINES = "prefill-engines"
ENGINE_SETTINGS = ("replicas", "max_replicas", "min_replicas", "num_cpus", "num_gpus", "max_ongoing", "engine",
                   "prefill_replicas")  # fmt: skip


@dataclass(frozen=True)
class ClusterSettings:
    """The arguments of the application; a Serve config file gives them as `args`."""

    model: str | None = None  # a file, a folder or a name; None: the embedded model
    model_name: str | None = None  # as clients see it
    replicas: int = 1  # engines; with `max_replicas` the number at the start
    max_replicas: int | None = None  # more than `replicas`: autoscaling on waiting requests
    min_replicas: int = 1  # with `max_replicas`
    prefill_replicas: int = 0  # engines that compute prompts for the others; 0: every engine computes its own
    prefill_threshold: int = 64  # tokens of the shortest prompt that they compute
    front_ends: int = 1
    num_cpus: float = 1.0  # of each engine
    num_gpus: float = 0.0
    front_end_cpus: float = 0.5  # of each front end
    max_ongoing: int = 512  # requests in flight on one engine
    drain_seconds: float = 30.0  # that requests in flight get when a replica is replaced or removed
    request_tokens: float = 512.0  # cost of a request in flight against cached tokens (`cluster.prefix_router`)
    request_timeout: float = 600.0  # seconds
    max_queue: int = 256  # requests that wait, beyond the slots of all engines
    keys: list[str] = field(default_factory=list)  # accepted API keys
    cors_origins: list[str] = field(default_factory=list)
    metrics_compat: str | None = None  # "vllm"
    engine: dict[str, Any] = field(default_factory=dict)  # arguments of `LLM`


def settings_of(args: dict[str, Any]) -> ClusterSettings:
    """The settings of a config file, with an error that names a wrong field."""
    known = {one.name for one in fields(ClusterSettings)}
    for name in args:
        if name not in known:
            raise ConfigError(f"the cluster has no setting {name!r}{did_you_mean(name, known)}")
    try:
        return msgspec.convert(args, ClusterSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"the settings of the cluster are wrong: {error}") from error


@serve.ingress()
class FrontEnd:
    """The HTTP application of one front end."""

    def __init__(self, engines: Any, settings: dict[str, Any], prefill: Any = None) -> None:
        self._engines = engines
        self._prefill = prefill
        self._settings = settings_of(settings)
        self._context: Any = None

    async def __serve_build_asgi_app__(self) -> Any:
        """Called by Ray once, on the event loop of the replica."""
        from bifolio.cluster.front_end import make_front_end

        secret = key_secret(self._settings.keys)
        self._context, app = await make_front_end(self._engines, self._settings, secret, self._prefill)
        return app

    def check_health(self) -> None:
        """A front end is healthy while its process runs; engines have checks of their own."""


def build(args: dict[str, Any]) -> Any:
    """The application, from the `args` of a Serve config file."""
    from bifolio.model.registry import DEFAULT_MODEL

    settings = settings_of(args)
    options = {**settings.engine, "model": str(settings.model or DEFAULT_MODEL)}
    engines = _engines(settings, ENGINES).options(**_number_of_replicas(settings))
    front_ends = serve.deployment(FrontEnd).options(
        name="front-ends",
        num_replicas=settings.front_ends,
        ray_actor_options={"num_cpus": settings.front_end_cpus},
        max_ongoing_requests=4096,
        graceful_shutdown_timeout_s=settings.drain_seconds,
    )
    if not settings.prefill_replicas:
        return front_ends.bind(engines.bind(options), _for_front_ends(settings))
    decoding = engines.bind(options, role="decode", prefill_threshold=settings.prefill_threshold)
    prefill = _engines(settings, PREFILL_ENGINES).options(num_replicas=settings.prefill_replicas)
    prefilling = prefill.bind({**options, "speculative": None}, role="prefill")
    return front_ends.bind(decoding, _for_front_ends(settings), prefilling)


def _engines(settings: ClusterSettings, name: str) -> Any:
    """A deployment of engines, without the number of its replicas."""
    router = {
        "request_router_class": "bifolio.cluster.ray_router.PrefixAffinityRouter",
        "request_router_kwargs": {"request_tokens": settings.request_tokens},
    }
    return serve.deployment(EngineReplica).options(
        name=name,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        max_ongoing_requests=settings.max_ongoing,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        health_check_period_s=5.0,
        logging_config=serve.schema.LoggingConfig(enable_access_log=False),  # calls of front ends, several a second
        request_router_config=serve.config.RequestRouterConfig(**router),
    )


def _for_front_ends(settings: ClusterSettings) -> dict[str, Any]:
    """The settings without those of the engines: an update of these leaves the front ends as they are."""
    other = ClusterSettings()
    same = {name: getattr(other, name) for name in ENGINE_SETTINGS}
    same["engine"] = {name: value for name, value in settings.engine.items() if name == "mmproj"}  # they prepare images
    values: dict[str, Any] = msgspec.to_builtins(replace(settings, **same))
    return values


def key_secret(keys: list[str]) -> bytes:
    """A secret that all front ends derive alike and that no client knows: digests of keys are made with it."""
    return blake2b("\n".join(sorted(keys)).encode(), digest_size=32, person=b"bifolio-keys").digest()


def _number_of_replicas(settings: ClusterSettings) -> dict[str, Any]:
    if settings.max_replicas is None:
        return {"num_replicas": settings.replicas}
    return {
        "autoscaling_config": serve.config.AutoscalingConfig(
            min_replicas=settings.min_replicas,
            initial_replicas=settings.replicas,
            max_replicas=settings.max_replicas,
            policy=serve.config.AutoscalingPolicy(policy_function="bifolio.cluster.autoscaling:by_waiting_requests"),
        )
    }
