"""The application in front of the applications of several models: a request's `model` selects one of them."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.routing import Route

from bifolio.serve.http.app import file_handler, guarded
from bifolio.serve.http.auth import App, KeyRing, Receive, Scope, Send, send_error
from bifolio.serve.http.context import Limits
from bifolio.serve.http.errors import ApiError, bad_request
from bifolio.serve.http.exchange import read_body, send_bytes, send_json
from bifolio.serve.page import page_files
from bifolio.serve.several.metrics import render
from bifolio.serve.several.pool import Entry, ModelPool, ModelState
from bifolio.serve.views.metrics import CONTENT_TYPE

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Wanted(msgspec.Struct):
    """The fields of a request that select its model; all others are left to the model's application."""

    model: Any = None
    name: Any = None  # of ollama
    keep_alive: Any = None


class Front:
    """The handlers that concern all models, and the way to the others."""

    def __init__(self, pool: ModelPool, limits: Limits) -> None:
        self._pool, self._limits = pool, limits
        self._created = int(time.time())

    # -- one model -------------------------------------------------------------------------------------------------
    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request to the application of its model, which is started if need be."""
        body = b""
        if scope["method"] in ("POST", "PUT", "PATCH"):
            body = await read_body(scope, receive, self._limits)
        wanted = _wanted(scope, body)
        entry = self._entry(wanted.model or wanted.name)
        if wanted.keep_alive is not None:
            entry_keep = seconds_of(wanted.keep_alive)
        async with self._pool.use(entry) as app:
            if wanted.keep_alive is not None:
                entry.keep_alive = entry_keep
            await app(scope, _replayed(body, receive), send)

    def _entry(self, name: Any) -> Entry:
        if name in (None, ""):
            return next(iter(self._pool.entries.values()))
        if not isinstance(name, str):
            raise bad_request("model is the name of a model", "model")
        return self._pool.find(name)

    # -- all models ------------------------------------------------------------------------------------------------
    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"object": "list", "data": [self._card(one) for one in self._pool.entries.values()]})

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, self._card(self._pool.find(scope["path_params"]["name"])))

    def _card(self, entry: Entry) -> dict[str, Any]:
        context = entry.context
        card = {"id": entry.source.name, "object": "model", "created": self._created, "owned_by": "bifolio",
                "status": {"value": entry.state.value, "failed": entry.problem is not None},
                "size": entry.source.num_bytes, "error": entry.problem}  # fmt: skip
        if context is not None:
            card |= {"max_model_len": context.max_model_len,
                     "has_chat_template": context.model.chat_template is not None,
                     "reads_images": context.model.vision is not None,
                     "max_body_bytes": context.limits.max_body_bytes}  # fmt: skip
        return card

    async def running(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ollama's `/api/ps`: the models that take memory."""
        found = [self._running(one) for one in self._pool.entries.values() if one.is_counted]
        body = {"models": found, "memory": {"used": self._pool.num_bytes, "budget": self._pool.settings.max_bytes}}
        await send_json(send, body)

    def _running(self, entry: Entry) -> dict[str, Any]:
        left = entry.expires_in
        expires = None if left is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + left))
        context = entry.context
        return {"name": entry.source.name, "model": entry.source.name, "size": entry.source.num_bytes, "size_vram": 0,
                "state": entry.state.value, "open_requests": entry.num_open, "expires_at": expires,
                "context_length": 0 if context is None else context.max_model_len}  # fmt: skip

    async def tags(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = [{"name": one.source.name, "model": one.source.name, "size": one.source.num_bytes,
                  "state": one.state.value} for one in self._pool.entries.values()]  # fmt: skip
        await send_json(send, {"models": found})

    async def load(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry = self._entry(_wanted(scope, await read_body(scope, receive, self._limits)).model)
        await self._pool.load(entry)
        await send_json(send, {"success": True})

    async def unload(self, scope: Scope, receive: Receive, send: Send) -> None:
        entry = self._entry(_wanted(scope, await read_body(scope, receive, self._limits)).model)
        if entry.state is ModelState.UNLOADED:
            raise ApiError(400, f"the model {entry.source.name!r} is not loaded", "model_not_loaded", param="model")
        await self._pool.unload(entry)
        await send_json(send, {"success": True})

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, {"status": "ok"})

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._pool.draining:
            raise ApiError(503, "the server is shutting down: ask another one", "shutting_down", retry_after=5)
        await send_json(send, {"status": "ready"})

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, await render(self._pool), CONTENT_TYPE.encode())


ROUTES = (
    ("/v1/models", "GET", "models"),
    ("/v1/models/{name:path}", "GET", "model"),
    ("/models", "GET", "models"),
    ("/models/load", "POST", "load"),
    ("/models/unload", "POST", "unload"),
    ("/api/ps", "GET", "running"),
    ("/api/tags", "GET", "tags"),
    ("/health", "GET", "health"),
    ("/ready", "GET", "ready"),
    ("/metrics", "GET", "metrics"),
)


class Answered:
    """An ASGI application around a handler, with errors in the shape of the protocol."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._handler(scope, receive, send)
        except ApiError as error:
            if error.status != 499:
                await send_error(send, error, scope["path"])


def make_several_app(
    pool: ModelPool, limits: Limits, keys: KeyRing, origins: Iterable[str], hosts: Iterable[str] | None
) -> App:
    """The application of a server with several models."""
    front, files = Front(pool, limits), page_files()
    routes = [Route(path, Answered(getattr(front, name)), methods=[method]) for path, method, name in ROUTES]
    routes += [Route(path, Answered(file_handler(*file)), methods=["GET"]) for path, file in files.items()]
    routes.append(Route("/{path:path}", Answered(front.forward)))
    app = Starlette(routes=routes, middleware=guarded(keys, files, origins, hosts))
    app.router.redirect_slashes = False
    return app


def _wanted(scope: Scope, body: bytes) -> Wanted:
    """The fields of the body, or of the query, that select the model."""
    if not body:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        return Wanted(model=query.get("model", [None])[0])
    try:
        return msgspec.json.decode(body, type=Wanted)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, and then the messages of the connection."""
    unread: list[Any] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return unread.pop() if unread else await receive()

    return again


def seconds_of(value: Any) -> float | None:
    """ollama's keep_alive: seconds, or a text such as "5m"; a negative number: for ever (None)."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return None if value < 0 else float(value)
    text = str(value).strip()
    for unit in sorted(UNITS, key=len, reverse=True):
        if text.endswith(unit):
            try:
                number = json.loads(text.removesuffix(unit))
                return None if number < 0 else number * UNITS[unit]
            except (ValueError, TypeError):
                break
    raise bad_request(f"keep_alive is a number of seconds or a text such as '5m', not {text!r}", "keep_alive")
