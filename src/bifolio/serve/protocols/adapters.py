"""Low-rank adapters: loaded and unloaded as vLLM's clients expect it, listed as those of llama.cpp's server do.

The paths that change adapters need an admin key (`serve.http.auth.ADMIN_PATHS`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from bifolio.serve.http.auth import Receive, Scope, Send
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import bad_request
from bifolio.serve.http.exchange import decode, read_body, send_json
from bifolio.serve.protocols.common import RouteRow
from bifolio.serve.protocols.llama_cpp_types import ScaledAdapter
from bifolio.serve.protocols.openai_types import Name, Strict

ScaledAdapters = Annotated[list[ScaledAdapter], Meta(max_length=64)]
AdapterPath = Annotated[str, Meta(min_length=1, max_length=4096)]


class LoadAdapterRequest(Strict, kw_only=True):
    """An adapter on the server's disk, under a name."""

    lora_name: Name
    lora_path: AdapterPath
    load_inplace: bool = False  # replace the adapter of this name


class UnloadAdapterRequest(Strict, kw_only=True):
    """The name of an adapter, which is forgotten."""

    lora_name: Name


async def load(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), LoadAdapterRequest)
    if request.lora_name == context.name:
        raise bad_request(f"{request.lora_name!r} is the name of the model: choose another", "lora_name")
    await context.engine.adapt(request.lora_name, request.lora_path, in_place=request.load_inplace)
    await send_json(send, {"status": "loaded", "id": request.lora_name, "parent": context.name})


async def unload(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), UnloadAdapterRequest)
    await context.engine.adapt(request.lora_name)
    await send_json(send, {"status": "unloaded", "id": request.lora_name, "parent": context.name})


async def listed(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    """As llama.cpp's server lists them, with the scales of requests that name no adapter."""
    rows = [
        {"id": each.number - 1, "name": each.name, "path": each.path, "scale": each.scale}
        for each in context.engine.adapters
    ]
    await send_json(send, rows)


async def scale(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    """Set the scales of requests that name no adapter; an adapter that is not in the list gets 0."""
    request = decode(await read_body(scope, receive, context.limits), ScaledAdapters)
    names = names_by_id(context)
    scales: dict[str, float] = {}
    for each in request:
        scales[named(names, each)] = each.scale
    await context.engine.scale_adapters({name: factor for name, factor in scales.items() if factor})
    await listed(context, scope, receive, send)


def names_by_id(context: ServerContext) -> dict[int, str]:
    return {each.number - 1: each.name for each in context.engine.adapters}


def named(names: dict[int, str], wanted: ScaledAdapter) -> str:
    """The name of an adapter that a client names by its number."""
    if wanted.id not in names:
        raise bad_request(f"no adapter has the id {wanted.id}: GET /lora-adapters lists them", "lora")
    return names[wanted.id]


ROUTES: tuple[RouteRow, ...] = (
    ("/v1/load_lora_adapter", "POST", load),
    ("/v1/unload_lora_adapter", "POST", unload),
    ("/lora-adapters", "GET", listed),
    ("/lora-adapters", "POST", scale),
)
