"""`/v1/snapshots`: texts with their part of the cache, in files of the server, and llama.cpp's slot files over them."""

from __future__ import annotations

import secrets
import time
from urllib.parse import parse_qs

from bifolio.api.messages import BranchCall, BranchReply, SnapshotInfo
from bifolio.serve.http.auth import Receive, Scope, Send
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import ApiError, bad_request
from bifolio.serve.http.exchange import decode, read_body, send_json
from bifolio.serve.http.running import tenant_of
from bifolio.serve.http.tools import ToolPlan
from bifolio.serve.http.turn import chat_tokens
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.protocols import snapshot_types as t
from bifolio.serve.protocols.branches import branch_card, branch_verb, prompt_tokens
from bifolio.serve.protocols.common import RouteRow

ACTIONS = ("save", "restore", "erase")


async def save(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request, tenant = decode(await read_body(scope, receive, context.limits), t.SnapshotSave), tenant_of(scope)
    given = [request.branch, request.response, request.prompt, request.messages]
    if sum(one is not None for one in given) != 1:
        raise bad_request("a snapshot is of a branch, a response, a prompt or messages: pass one of them", "prompt")
    if request.cache_salt is not None and (request.branch is not None or request.response is not None):
        raise bad_request("a branch or a response has the cache_salt that it began with: leave it out", "cache_salt")
    tokens: list[int] = []
    if request.messages is not None:
        tokens = await chat_tokens(context, p.ChatRequest(messages=request.messages), ToolPlan(), tenant)
    elif request.prompt is not None:
        tokens = await prompt_tokens(context, request.prompt, request.add_special_tokens)
    call = BranchCall(
        "", "save", name=request.branch or "", response=request.response or "", token_ids=tokens,
        file=request.id or f"snap_{secrets.token_hex(12)}", cache_salt=(request.cache_salt or "").encode(),
        adapters=_adapters(context, request),
    )  # fmt: skip
    await send_json(send, _card((await _verb(context, scope, receive, call)).snapshots[0]))


async def list_all(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    reply = await _verb(context, scope, receive, BranchCall("", "list"))
    await send_json(send, t.SnapshotList([_card(info) for info in reply.snapshots]))


async def look(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    reply = await _verb(context, scope, receive, BranchCall("", "list", file=scope["path_params"]["id"]))
    await send_json(send, _card(reply.snapshots[0]))


async def remove(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    name = scope["path_params"]["id"]
    await _verb(context, scope, receive, BranchCall("", "forget", file=name))
    await send_json(send, t.RemovedSnapshot(name))


async def restore(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits) or b"{}", t.SnapshotRestore)
    adapters = context.adapters_for(request.model)
    call = BranchCall(
        "", "restore", file=scope["path_params"]["id"], seconds=request.ttl, recompute=request.recompute,
        adapters=adapters,
    )  # fmt: skip
    await send_json(send, branch_card(context, await _verb(context, scope, receive, call)))


async def slot_action(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    """llama.cpp's slot files: the newest text of a slot, as far as it is the client's own."""
    action = parse_qs(scope["query_string"].decode("latin-1")).get("action", [""])[-1]
    if action not in ACTIONS:
        raise bad_request(f"action is one of {', '.join(ACTIONS)}, not {action!r}", "action")
    slot, started = _slot_number(context, scope["path_params"]["id"]), time.perf_counter()
    body, name = await read_body(scope, receive, context.limits), ""
    if action != "erase":
        name = decode(body, t.SlotFile).filename
    call = BranchCall("", f"{action}_slot", count=slot, file=name)  # type: ignore[arg-type]
    info = (await _verb(context, scope, receive, call)).snapshots[0]
    spent = 1000 * (time.perf_counter() - started)
    answer = t.SlotResult(id_slot=slot)
    if action == "save":
        answer.filename, answer.n_saved, answer.n_written = name, info.num_tokens, info.num_bytes
        answer.timings = {"save_ms": spent}
    elif action == "restore":
        answer.filename, answer.n_restored, answer.n_read = name, info.num_tokens, info.num_bytes
        answer.timings = {"restore_ms": spent}
    else:
        answer.n_erased = info.num_tokens
    await send_json(send, answer)


def _slot_number(context: ServerContext, text: str) -> int:
    count = 0 if context.engine.hello is None else context.engine.hello.max_num_seqs
    if not text.isascii() or not text.isdigit() or int(text[:9]) >= count:
        raise ApiError(404, f"there is no slot {text[:20]!r}: GET /slots lists 0 to {count - 1}", "slot_not_found")
    return int(text)


async def _verb(context: ServerContext, scope: Scope, receive: Receive, call: BranchCall) -> BranchReply:
    return await branch_verb(context, scope, receive, call, name=call.name, salt=tenant_of(scope).salt)


def _adapters(context: ServerContext, request: t.SnapshotSave) -> list[tuple[str, float]]:
    """The adapters of a text to save; a branch has its own."""
    if request.branch is not None:
        if request.model:
            raise bad_request("a branch has the model that it was opened with: leave it out", "model")
        return []
    return context.adapters_for(request.model)


def _card(info: SnapshotInfo) -> t.SnapshotCard:
    kind = "response" if info.is_response else "snapshot"
    return t.SnapshotCard(info.name, info.num_tokens, info.num_bytes, int(info.created), kind)  # type: ignore[arg-type]


ROUTES: tuple[RouteRow, ...] = (
    ("/v1/snapshots", "POST", save),
    ("/v1/snapshots", "GET", list_all),
    ("/v1/snapshots/{id}", "GET", look),
    ("/v1/snapshots/{id}", "DELETE", remove),
    ("/v1/snapshots/{id}/restore", "POST", restore),
    ("/slots/{id}", "POST", slot_action),
)
