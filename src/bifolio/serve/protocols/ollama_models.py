"""ollama's list of models, their description, and `/api/pull` with its progress."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from bifolio.errors import BifolioError
from bifolio.serve.http.auth import Receive, Scope, Send
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import ApiError
from bifolio.serve.http.events import Event
from bifolio.serve.http.exchange import Framing, decode, read_body, send_events, send_json
from bifolio.serve.protocols.common import RouteRow, json_line
from bifolio.serve.protocols.ollama_types import PullRequest, ShowRequest
from bifolio.text.reasoning import reasoning_format

NDJSON = Framing(
    [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")],
    b"",
    lambda error: error.body("/api/") + b"\n",
)
PROGRESS_SECONDS = 0.2  # between two lines of progress
_fetches: set[asyncio.Task[Any]] = set()  # one at most; it goes on when its client leaves


def _size(context: ServerContext) -> int:
    path = context.model.path
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def _details(context: ServerContext) -> dict[str, Any]:
    config = context.model.config
    return {
        "parent_model": "",
        "format": "gguf" if context.model.path.suffix == ".gguf" else "safetensors",
        "family": config.architecture,
        "families": [config.architecture],
        "parameter_size": f"{config.num_parameters / 1e6:.1f}M",
        "quantization_level": "unknown",
    }


async def _entry(context: ServerContext) -> dict[str, Any]:
    size = await asyncio.to_thread(_size, context)
    digest = hashlib.sha256(f"{context.name}\0{size}".encode()).hexdigest()
    created = datetime.fromtimestamp(context.created, UTC).isoformat()
    return {"name": context.name, "model": context.name, "modified_at": created, "size": size, "digest": digest,
            "details": _details(context)}  # fmt: skip


async def tags(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, {"models": [await _entry(context)]})


async def running(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    entry = await _entry(context)
    entry |= {"size_vram": 0, "context_length": context.max_model_len, "expires_at": entry["modified_at"]}
    await send_json(send, {"models": [entry]})


async def show(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), ShowRequest)
    context.check_model((request.model or request.name or "").removesuffix(":latest"))
    template, config = context.model.chat_template or "", context.model.config
    can = ["completion", "embedding"]
    can += ["vision"] if context.model.vision is not None else []
    can += ["tools"] if "tools" in template else []
    can += ["thinking"] if reasoning_format(template) is not None else []
    info = {
        "general.architecture": config.architecture,
        "general.parameter_count": config.num_parameters,
        f"{config.architecture}.context_length": context.max_model_len,
        f"{config.architecture}.embedding_length": config.hidden_size,
        f"{config.architecture}.block_count": config.num_layers,
    }
    body = {"modelfile": "", "parameters": "", "template": template, "details": _details(context), "model_info": info,
            "capabilities": can, "modified_at": (await _entry(context))["modified_at"]}  # fmt: skip
    await send_json(send, body)


async def pull(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    """Fetch a model into the cache, for a later start; only where the server was started with `--allow-pull`."""
    request = decode(await read_body(scope, receive, context.limits), PullRequest)
    name = request.model or request.name or ""
    if name not in ("", context.name) and not context.allow_pull:
        message = f"this server does not fetch {name!r}: start it with --allow-pull, or run `bifolio pull {name}`"
        raise ApiError(403, message, param="model")
    if _fetches:
        raise ApiError(429, "another model is being fetched: ask again when it is complete", retry_after=10)
    lines = _progress(context, name)
    if request.stream:
        await send_events(send, lines, context.limits.write_timeout, 0.0, NDJSON)
        return
    async for _ in lines:
        pass
    await send_json(send, {"status": "success"})


async def _progress(context: ServerContext, name: str) -> AsyncIterator[list[Event]]:
    from bifolio.model.pull import pull as fetch

    yield [json_line({"status": "pulling manifest"})]
    if name not in ("", context.name):
        state = [0, 0]  # bytes so far, bytes of all

        def note(done: int, total: int) -> None:
            state[:] = [done, total]

        work = asyncio.create_task(asyncio.to_thread(fetch, name, progress=note))
        _fetches.add(work)
        work.add_done_callback(_fetches.discard)
        while not work.done():
            await asyncio.wait({work}, timeout=PROGRESS_SECONDS)
            yield [json_line({"status": f"pulling {name}", "completed": state[0], "total": state[1]})]
        try:
            work.result()
        except BifolioError as error:
            raise ApiError(400, str(error)) from error
    yield [json_line({"status": "success"})]


ROUTES: tuple[RouteRow, ...] = (
    ("/api/tags", "GET", tags),
    ("/api/ps", "GET", running),
    ("/api/show", "POST", show),
    ("/api/pull", "POST", pull),
)
