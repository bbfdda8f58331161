"""A front end of a Ray Serve application: the HTTP application of `bifolio.serve` over a `ReplicaEngine`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from bifolio.cluster.prefill_pool import PrefillPool
from bifolio.cluster.prefix_router import PrefixRouter
from bifolio.cluster.replica_engine import ReplicaEngine
from bifolio.cluster.routing_table import router_of
from bifolio.model.loader import open_text_model
from bifolio.serve.http.app import make_app
from bifolio.serve.http.auth import KeyRing
from bifolio.serve.http.context import Limits, ServerContext, public_name
from bifolio.serve.views.vllm_metrics import with_vllm_names

if TYPE_CHECKING:
    from bifolio.cluster.application import ClusterSettings


async def make_front_end(
    engines: Any, settings: ClusterSettings, secret: bytes, prefill: Any = None
) -> tuple[ServerContext, Any]:
    """The context and the ASGI application, once a replica is ready."""
    from bifolio.model.registry import DEFAULT_MODEL

    reference = str(settings.model or DEFAULT_MODEL)
    mmproj = settings.engine.get("mmproj")
    model = open_text_model(reference, mmproj)
    pool = None if prefill is None else PrefillPool(prefill, _router(prefill), settings.prefill_threshold)
    engine = ReplicaEngine(engines, _router(engines), pool)
    await asyncio.gather(engine.start(), asyncio.to_thread(lambda: model.tokenizer))
    limits = Limits(max_queue=settings.max_queue, request_timeout=settings.request_timeout)
    name = public_name(reference, settings.model_name)
    context = ServerContext(model, engine, name, limits, reference=reference, mmproj=mmproj)
    if settings.metrics_compat is not None:
        context.metrics.extend = with_vllm_names(name, lambda: engine.hello)
    return context, make_app(context, KeyRing(settings.keys, secret), settings.cors_origins)


def _router(handle: Any) -> PrefixRouter:
    return router_of(f"{handle.app_name}/{handle.deployment_name}")
