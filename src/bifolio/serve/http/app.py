"""The HTTP application: routes, the wrapper of every handler, and the short handlers."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bifolio.errors import BifolioError, EngineFaultError, RequestError
from bifolio.garbage import forget_frames
from bifolio.serve.http.auth import App, Guard, KeyRing, Receive, Scope, Send, send_error
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.encoding import JsonList
from bifolio.serve.http.errors import ApiError, api_error, bad_request
from bifolio.serve.http.exchange import decode, read_body, send_bytes, send_json
from bifolio.serve.http.hosts import HostGuard
from bifolio.serve.http.running import run_call, tenant_of
from bifolio.serve.http.sampling import request_defaults
from bifolio.serve.http.tools import ToolPlan
from bifolio.serve.http.turn import chat_tokens
from bifolio.serve.page import page_files
from bifolio.serve.protocols import chat as chat_calls
from bifolio.serve.protocols import completions as completion_calls
from bifolio.serve.protocols import openai_answers as r
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.protocols.routes import PROTOCOL_ROUTES
from bifolio.serve.views.docs_page import docs_page
from bifolio.serve.views.live import live_events
from bifolio.serve.views.logs import request_id
from bifolio.serve.views.metrics import CONTENT_TYPE
from bifolio.serve.views.openapi import openapi_document

logger = logging.getLogger("bifolio.http")
Handler = Callable[[Scope, Receive, Send], Awaitable[None]]
PAGE_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),  # blob: images that a user adds to a chat
)
MAX_SHOWN_PATH = 200  # characters of a path in an error
TEXTS_AT_ONCE = 4096  # of tokens, before other requests get a turn
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")


class Endpoint:
    """An ASGI application around a handler: an id, a log line, and errors in the right shape."""

    def __init__(self, context: ServerContext, path: str, handler: Handler) -> None:
        self._context = context
        self._path = path
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        name = given.decode() if _SANE_ID.fullmatch(given) else secrets.token_hex(8)
        token = request_id.set(name)
        began = time.perf_counter()
        status = 0

        async def observed(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        metrics = self._context.metrics
        metrics.open_responses.inc()
        try:
            await self._handler(scope, receive, observed)
        except Exception as error:
            answer = _answer_to(error)
            forget_frames(error)
            if not status and answer.status != 499:
                await send_error(observed, answer, self._path)
            status = answer.status
        finally:
            metrics.open_responses.dec()
            metrics.responses.labels(self._path, str(status or 499)).inc()
            self._log(scope, status or 499, time.perf_counter() - began)
            request_id.reset(token)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        quiet = self._path in ("/health", "/ready", "/metrics") and status == 200
        logger.log(
            logging.DEBUG if quiet else logging.INFO,
            "request",
            extra={
                "method": scope["method"],
                "path": self._path,
                "status": status,
                "seconds": round(seconds, 4),
                "tenant": scope["state"]["tenant"].name if "tenant" in scope.get("state", {}) else None,
                **scope.get("state", {}).get("usage", {}),
            },
        )


class Handlers:
    """One method for each route."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._document: dict[str, Any] | None = None

    # -- generating --------------------------------------------------------------------------------------------------
    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._context.limits)
        request = decode(body, p.CompletionRequest)
        call = await completion_calls.prepare(self._context, request, tenant_of(scope))
        await run_call(self._context, call, scope, receive, send)

    async def chat_completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._context.limits)
        request = decode(body, p.ChatRequest)
        call = await chat_calls.prepare(self._context, request, tenant_of(scope))
        await run_call(self._context, call, scope, receive, send)

    # -- text and tokens -----------------------------------------------------------------------------------------------
    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        request = decode(await read_body(scope, receive, context.limits), p.TokenizeRequest)
        context.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise bad_request("/tokenize needs a prompt or messages: pass one of them")
        if request.messages is not None:
            chat_request = p.ChatRequest(messages=request.messages)
            tokens = array("i", await chat_tokens(context, chat_request, ToolPlan(), tenant_of(scope)))
        else:
            tokens = await context.tokenizers.encode_packed(request.prompt or "", request.add_special_tokens)
        ids, texts = JsonList(), JsonList()  # without an object for each of a million tokens
        for first in range(0, len(tokens), TEXTS_AT_ONCE):
            piece = tokens[first : first + TEXTS_AT_ONCE].tolist()
            ids.extend(piece)
            texts.extend([context.texts.text(token) for token in piece])
            await asyncio.sleep(0)
        await send_json(send, r.Tokens(ids.raw(), texts.raw(), len(tokens), context.max_model_len))

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._context
        request = decode(await read_body(scope, receive, context.limits), p.DetokenizeRequest)
        context.check_model(request.model)
        vocab = context.model.config.vocab_size
        largest = max(request.tokens, default=0)
        if largest >= vocab:
            raise bad_request(
                f"the token id {largest} is outside the vocabulary of {vocab} tokens: pass ids from 0 to {vocab - 1}",
                "tokens",
            )
        text = await context.tokenizers.decode(request.tokens, request.skip_special_tokens)
        await send_json(send, r.Detokenized(text))

    # -- looking -------------------------------------------------------------------------------------------------------
    async def models(self, scope: Scope, receive: Receive, send: Send) -> None:
        adapters = [self._card(each.name) for each in self._context.engine.adapters]
        await send_json(send, r.ModelList([self._card(), *adapters]))

    async def model(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["name"]
        await send_json(send, self._card(name if self._context.adapters_of(name) else None))

    def _card(self, adapter: str | None = None) -> r.ModelCard:
        """The card of the model, or of one of its adapters."""
        context = self._context
        defaults = request_defaults(context.model.sampling_defaults)
        has_template = context.model.chat_template is not None
        return r.ModelCard(
            adapter or context.name,
            context.created,
            context.max_model_len,
            has_chat_template=has_template,
            sampling_defaults=defaults,
            parent=None if adapter is None else context.name,
            reads_images=context.model.vision is not None,
            max_body_bytes=context.limits.max_body_bytes,
        )

    async def health(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, r.Health("ok"))

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._context.draining or not self._context.engine.health().is_ready:
            raise ApiError(503, "the engine is not ready: ask again in 2 s", "engine_unavailable", retry_after=2)
        await send_json(send, r.Health("ready"))

    async def kv_transfer(self, scope: Scope, receive: Receive, send: Send) -> None:
        hello = self._context.engine.hello
        if hello is None or not hello.transfer_port:
            raise ApiError(404, "this server has no prefill engine: start it with --role prefill", "not_found")
        await send_json(send, r.BlockAddress(hello.transfer_port))

    async def metrics(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, await self._context.render_metrics(), CONTENT_TYPE.encode())

    async def openapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._document is None:
            self._document = openapi_document()
        await send_json(send, self._document)

    async def docs(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, docs_page().encode(), b"text/html; charset=utf-8", headers=PAGE_HEADERS)

    async def live(self, scope: Scope, receive: Receive, send: Send) -> None:
        await live_events(self._context, scope, receive, send)


ROUTES: tuple[tuple[str, str, str], ...] = (  # path, method, name of the handler
    ("/v1/completions", "POST", "completions"),
    ("/v1/chat/completions", "POST", "chat_completions"),
    ("/v1/models", "GET", "models"),
    ("/v1/models/{name:path}", "GET", "model"),
    ("/tokenize", "POST", "tokenize"),
    ("/detokenize", "POST", "detokenize"),
    ("/health", "GET", "health"),
    ("/ready", "GET", "ready"),
    ("/kv_transfer", "GET", "kv_transfer"),
    ("/metrics", "GET", "metrics"),
    ("/openapi.json", "GET", "openapi"),
    ("/live", "GET", "live"),
    ("/docs", "GET", "docs"),
)


def make_app(
    context: ServerContext,
    keys: KeyRing | None = None,
    cors_origins: Iterable[str] = (),
    hosts: Iterable[str] | None = None,
    admin_keys: KeyRing | None = None,
) -> App:
    """The application, guarded. `hosts`: the names that a server without keys answers to; None: any."""
    handlers = Handlers(context)
    routes = [
        Route(path, Endpoint(context, path, getattr(handlers, name)), methods=[method]) for path, method, name in ROUTES
    ]
    routes += [
        Route(path, Endpoint(context, path, partial(handler, context)), methods=[method])
        for path, method, handler in PROTOCOL_ROUTES
    ]
    files = page_files()
    routes += [
        Route(path, Endpoint(context, "page", file_handler(*file)), methods=["GET"]) for path, file in files.items()
    ]
    middleware = guarded(keys or KeyRing(), files, cors_origins, hosts, admin_keys)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})
    app.router.redirect_slashes = False
    return app


def guarded(
    keys: KeyRing,
    open_paths: Iterable[str],
    cors_origins: Iterable[str],
    hosts: Iterable[str] | None,
    admin_keys: KeyRing | None = None,
) -> list[Middleware]:
    """The middleware in front of all routes, the outermost first."""
    origins = list(cors_origins)
    middleware = [Middleware(Guard, keys=keys, open_paths=open_paths, admin_keys=admin_keys)]
    if hosts is not None and not keys:
        middleware.insert(0, Middleware(HostGuard, hosts=list(hosts), origins=origins))
    if origins:
        middleware.insert(
            0, Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
        )
    return middleware


def file_handler(body: bytes, content_type: bytes) -> Handler:
    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        await send_bytes(send, body, content_type, headers=PAGE_HEADERS)

    return handler


def _answer_to(error: Exception) -> ApiError:
    """The answer to a request whose handler failed."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineFaultError):
        return api_error(error)
    if isinstance(error, RequestError):
        return bad_request(str(error))
    logger.exception("a handler failed")
    return ApiError(500, str(error) if isinstance(error, BifolioError) else "internal error", "internal_error")


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = {**(error.headers or {})} if isinstance(error, HTTPException) else {}
    path, allowed = request.url.path, headers.get("Allow", "another method")
    messages = {
        404: f"this server has no {path[:MAX_SHOWN_PATH]}: GET /docs lists its paths",
        405: f"{path[:MAX_SHOWN_PATH]} takes {allowed}, not {request.method}",
    }
    answer = ApiError(status, messages.get(status, "the request was refused"))
    return Response(answer.body(path), status, {**headers, **answer.headers()})
