"""`/v1/branches`: hold a text in the engine, fork it, append to it, generate from it, score continuations, and cut it.

Generating and scoring are ordinary requests, whose tokens the engine takes from the branch.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from bifolio.api.messages import BranchCall, BranchReply, Image
from bifolio.errors import EngineFaultError
from bifolio.images import PromptImage
from bifolio.serve.http.auth import Receive, Scope, Send
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import ApiError, api_error, bad_request
from bifolio.serve.http.events import Event
from bifolio.serve.http.exchange import decode, read_body, send_json
from bifolio.serve.http.generation import Job, Run
from bifolio.serve.http.running import run_call, tenant_of, unless_gone
from bifolio.serve.http.sampling import EngineParams
from bifolio.serve.http.tools import ToolPlan
from bifolio.serve.http.turn import chat_prompt
from bifolio.serve.http.whole_answers import Whole
from bifolio.serve.protocols import branch_types as t
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.protocols.common import RouteRow
from bifolio.serve.protocols.completions import prepare as prepare_completion
from bifolio.serve.protocols.completions import read_prompts
from bifolio.serve.protocols.openai_answers import Usage

SCORING = EngineParams({"temperature": 0.0, "max_tokens": 0, "prompt_logprobs": 0})
OWN_FIELDS = frozenset(("advance",))  # of `BranchGenerate`, beside those of a completion


@dataclass(slots=True)
class ScoreCall:
    """The scores of all continuations of one request."""

    job: Job

    def whole(self, whole: Whole, usage: Usage) -> t.ScoreList:
        data = []
        for scores in whole.prompt_logprobs:
            scored = [one for one in scores or () if one is not None]
            logprobs, ranks = [one.logprob for one in scored], [one.rank for one in scored]
            tokens, is_greedy = [one.token_id for one in scored], all(rank == 1 for rank in ranks)
            data.append(t.ContinuationScore(tokens, logprobs, ranks, math.fsum(logprobs), is_greedy))
        return t.ScoreList(data, t.ScoreUsage(usage.prompt_tokens))

    def events(self, run: Run) -> AsyncIterator[list[Event]]:
        raise ApiError(400, "scores are not streamed: leave `stream` out", "invalid_request", param="stream")


async def open_branch(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request, tenant = decode(await read_body(scope, receive, context.limits), t.BranchOpen), tenant_of(scope)
    adapters = context.adapters_for(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("a branch begins with a prompt or with messages: pass one of them", "prompt")
    images: tuple[PromptImage, ...] = ()
    if request.messages is not None:
        tokens, images = await chat_prompt(context, p.ChatRequest(messages=request.messages), ToolPlan(), tenant)
    else:
        tokens = await prompt_tokens(context, request.prompt or [], request.add_special_tokens)
    salt = tenant.salt + (request.cache_salt or "").encode()
    call = BranchCall("", "open", token_ids=tokens, salt=salt, seconds=request.ttl, adapters=adapters)
    call.images = [Image.of(image) for image in images]
    await send_json(send, branch_card(context, await _call(context, scope, receive, call)))


async def fork(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.BranchFork)
    reply = await _call(context, scope, receive, BranchCall("", "fork", count=request.n))
    await send_json(send, t.BranchList([branch_card(context, reply, name) for name in reply.names]))


async def append(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.BranchAppend)
    tokens = await prompt_tokens(context, request.prompt, special=False)
    call = BranchCall("", "append", token_ids=tokens, to_answer=request.to_answer)
    await send_json(send, branch_card(context, await _call(context, scope, receive, call)))


async def truncate(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.BranchTruncate)
    reply = await _call(context, scope, receive, BranchCall("", "truncate", count=request.num_tokens))
    await send_json(send, branch_card(context, reply))


async def look(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    reply = await _call(context, scope, receive, BranchCall("", "look"))
    card = branch_card(context, reply)
    card.token_ids = array("i", reply.token_ids).tolist()
    card.blocks = reply.blocks
    await send_json(send, card)


async def close(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    reply = await _call(context, scope, receive, BranchCall("", "close"))
    await send_json(send, t.ClosedBranch(reply.names[0]))


async def generate(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.BranchGenerate)
    reply = await _call(context, scope, receive, BranchCall("", "look"))
    fields = {name: getattr(request, name) for name in request.__struct_fields__ if name not in OWN_FIELDS}
    if request.beam_search is not None:
        raise bad_request("a branch does not go on in beams: leave it out, or fork the branch", "beam_search")
    if request.cache_salt is not None:
        raise bad_request("a branch has the cache_salt that it was opened with: leave it out", "cache_salt")
    if request.model and context.adapters_of(request.model) != reply.adapters:
        raise bad_request("a branch has the model that it was opened with: leave it out", "model")
    tokens: list[str | int | list[int]] = [*array("i", reply.token_ids)]
    completion = p.CompletionRequest(prompt=tokens, **fields)
    call = await prepare_completion(context, completion, tenant_of(scope))
    job = call.job
    job.branch, job.branch_use = reply.names[0], "advance" if request.advance else "beside"
    job.adapters, job.model = reply.adapters, model_of(context, reply)
    await run_call(context, call, scope, receive, send)


async def score(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request, tenant = decode(await read_body(scope, receive, context.limits), t.BranchScore), tenant_of(scope)
    texts = [one for one in request.continuations if isinstance(one, str)]
    encoded = iter(await context.tokenizers.encode(texts, False, context.max_model_len))
    prompts = [next(encoded) if isinstance(one, str) else one for one in request.continuations]
    context.check_scored(prompts, 1, SCORING)
    job = Job(tenant, prompts, SCORING, 1, False, branch=scope["path_params"]["id"], branch_use="score")
    await run_call(context, ScoreCall(job), scope, receive, send)


async def _call(context: ServerContext, scope: Scope, receive: Receive, call: BranchCall) -> BranchReply:
    """Run a verb on the branch of a request's path."""
    return await branch_verb(context, scope, receive, call, name=scope["path_params"].get("id", ""), salt=call.salt)


async def branch_verb(
    context: ServerContext, scope: Scope, receive: Receive, call: BranchCall, *, name: str, salt: bytes
) -> BranchReply:
    """Run a verb in the engine for the client of a request."""
    tenant = tenant_of(scope)
    call = msgspec.structs.replace(call, name=name, owner=tenant.name, share=tenant.share, salt=salt)
    with context.admission(tenant, 1):
        work = asyncio.ensure_future(context.engine.branch(call))
        try:
            reply: BranchReply = await unless_gone(work, receive, context.limits.request_timeout)
        except EngineFaultError as fault:
            raise api_error(fault) from fault
    return reply


async def prompt_tokens(context: ServerContext, prompt: str | list[int], special: bool) -> list[int]:
    [(_, tokens)] = await read_prompts(context, prompt, special)  # type: ignore[arg-type]
    return tokens


def model_of(context: ServerContext, reply: BranchReply) -> str:
    """The model's name in the API: that of an adapter, or of the base."""
    return "+".join(name for name, _ in reply.adapters) or context.name


def branch_card(context: ServerContext, reply: BranchReply, name: str | None = None) -> t.BranchCard:
    return t.BranchCard(
        name or reply.names[0], reply.num_tokens, reply.num_prompt, reply.seconds, model_of(context, reply)
    )


ROUTES: tuple[RouteRow, ...] = (
    ("/v1/branches", "POST", open_branch),
    ("/v1/branches/{id}", "GET", look),
    ("/v1/branches/{id}", "DELETE", close),
    ("/v1/branches/{id}/fork", "POST", fork),
    ("/v1/branches/{id}/append", "POST", append),
    ("/v1/branches/{id}/truncate", "POST", truncate),
    ("/v1/branches/{id}/generate", "POST", generate),
    ("/v1/branches/{id}/score", "POST", score),
)
