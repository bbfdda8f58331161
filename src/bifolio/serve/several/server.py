"""Starting and stopping a server of several models."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from bifolio.serve.helpers.allocator import return_large_blocks
from bifolio.serve.http.app import make_app
from bifolio.serve.http.auth import App, KeyRing
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.listening import check_certificate, reserve
from bifolio.serve.http.server import (
    Server,
    ServerSettings,
    answered_hosts,
    new_server,
    running_context,
    secret_of,
)
from bifolio.serve.several.application import make_several_app
from bifolio.serve.several.pool import ModelPool
from bifolio.serve.several.settings import ModelSource, SeveralModels


async def serve_several(settings: ServerSettings, models: SeveralModels, engine_options: dict[str, Any]) -> None:
    """Serve until told to stop. The models of `keep` are loaded first, all others on demand."""
    return_large_blocks()
    check_certificate(settings.tls_certificate, settings.tls_key)
    sockets = reserve(settings.host, settings.port)
    settings = replace(settings, port=sockets[0].getsockname()[1])
    try:
        pool, server = several_server(settings, models, engine_options)
        try:
            await pool.open()
            server.address = f"{'https' if settings.tls_certificate else 'http'}://{settings.host}:{settings.port}"
            await server.serve(sockets=sockets)
        finally:
            await pool.close()
    finally:
        for each in sockets:
            each.close()


def several_server(
    settings: ServerSettings, models: SeveralModels, engine_options: dict[str, Any]
) -> tuple[ModelPool, Server]:
    """The pool of engines, and the server in front of it."""
    keys, hosts = KeyRing(settings.keys, secret_of(settings, engine_options)), answered_hosts(settings)

    def open_model(source: ModelSource) -> AbstractAsyncContextManager[ServerContext]:
        options = {**engine_options, "memory": models.cache_bytes, **source.options, "model": source.reference}
        if models.sleep_bytes:
            options["enable_sleep_mode"] = True
        is_beside = any(entry.num_running for entry in pool.entries.values() if entry.source is not source)
        return running_context(replace(settings, model_name=source.name, starts_gently=is_beside), options)

    app_of: Any = partial(make_app, keys=keys, cors_origins=settings.cors_origins, hosts=hosts)
    pool = ModelPool(models, open_model, app_of)
    app: App = make_several_app(pool, settings.limits, keys, settings.cors_origins, hosts)
    return pool, new_server(settings, app, keys, pool)
