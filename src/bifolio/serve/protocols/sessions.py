"""`/v1/sessions`: the conversations that a client named (`session_id`), where their blocks are, and their release."""

from __future__ import annotations

import asyncio

import msgspec

from bifolio.api.messages import BranchCall
from bifolio.serve.http.auth import Receive, Scope, Send
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.exchange import send_json
from bifolio.serve.http.running import tenant_of
from bifolio.serve.protocols.branches import branch_verb
from bifolio.serve.protocols.common import RouteRow
from bifolio.serve.views.live import LOOK_TIMEOUT, visible_sessions


class SessionCard(msgspec.Struct):
    """A conversation as of its last request."""

    id: str
    state: str  # warm: in the cache; disk: the rest is in a tier or a file; gone: some of it must be computed again
    num_tokens: int
    num_cached_tokens: int
    num_protected_tokens: int  # that are evicted last
    ttl: float | None  # seconds left; null: pinned
    pin: bool
    object: str = "session"


class SessionList(msgspec.Struct):
    data: list[SessionCard]
    object: str = "list"


class ReleasedSession(msgspec.Struct):
    id: str
    deleted: bool = True
    object: str = "session"


async def list_all(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    tenant = tenant_of(scope)
    call = BranchCall("", "list_sessions", owner=tenant.name, share=tenant.share, salt=tenant.salt)
    async with asyncio.timeout(LOOK_TIMEOUT):
        found, saved = await context.engine.snapshot(), (await context.engine.branch(call)).snapshots
    cards = [
        SessionCard(
            one["session_id"], one["state"], one["tokens"], one["cached"], one["protected"], one["ttl"], one["pin"]
        )
        for one in visible_sessions(found.sessions, tenant)
    ]
    known = {card.id for card in cards}
    cards += [SessionCard(one.name, "disk", one.num_tokens, 0, 0, None, True) for one in saved if one.name not in known]
    await send_json(send, SessionList(cards))


async def release(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    name = scope["path_params"]["id"]
    call = BranchCall("", "forget_session")
    await branch_verb(context, scope, receive, call, name=name, salt=tenant_of(scope).salt)
    await send_json(send, ReleasedSession(name))


ROUTES: tuple[RouteRow, ...] = (
    ("/v1/sessions", "GET", list_all),
    ("/v1/sessions/{id}", "DELETE", release),
)
