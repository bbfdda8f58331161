"""Trainers: rollouts by token ids, pauses, and new weights, as prime-rl and TRL call them.

`/inference/v1/generate` takes and gives token ids with logprobs. `/pause`, `/resume`, `/update_weights` (a folder),
`/init_communicator/` and `/reset_prefix_cache` change the engine for all clients: the server refuses them unless it was
started for them. Tensors of `/update_named_param/` are in use from the next `/reset_prefix_cache/` or `/generate/` on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import parse_qs

import msgspec

from bifolio.api.messages import Control, Controlled
from bifolio.errors import EngineFaultError
from bifolio.logprob_records import TokenLogprob
from bifolio.serve.http.auth import Receive, Scope, Send
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import ApiError, api_error, bad_request
from bifolio.serve.http.events import Event
from bifolio.serve.http.exchange import decode, read_body, send_json
from bifolio.serve.http.generation import Job, Run
from bifolio.serve.http.running import run_call, tenant_of, unless_gone
from bifolio.serve.http.whole_answers import Answer, Whole
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.protocols import rollout_types as t
from bifolio.serve.protocols.common import RouteRow
from bifolio.serve.protocols.completions import CompletionCall, read_prompts
from bifolio.serve.protocols.completions import prepare as prepare_completion
from bifolio.serve.protocols.openai_answers import Usage

MODES = ("keep", "abort")


@dataclass(slots=True)
class RolloutCall:
    """One prompt of token ids; the answer is written when all of it is there."""

    call: CompletionCall
    id: str

    @property
    def job(self) -> Job:
        return self.call.job

    def whole(self, whole: Whole, usage: Usage) -> t.Rollout:
        choices = [
            t.RolloutChoice(index, answer.token_ids, answer.finish_reason, self._logprobs(answer))
            for index, answer in whole.choices()
        ]
        scores = whole.prompt_logprobs[0]
        prompt = None if scores is None else [None if each is None else _prompt_logprob(each) for each in scores]
        return t.Rollout(self.id, choices, whole.weight_version, whole.num_weight_changes, prompt)

    def _logprobs(self, answer: Answer) -> t.RolloutLogprobs | None:
        if self.call.request.logprobs is None:
            return None
        return t.RolloutLogprobs([_logprob(item) for item in answer.logprobs])

    def events(self, run: Run) -> AsyncIterator[list[Event]]:
        raise ApiError(400, "rollouts are not streamed", "invalid_request")


@dataclass(slots=True)
class TrlCall:
    """The rollouts of several prompts, in TRL's shape."""

    call: CompletionCall

    @property
    def job(self) -> Job:
        return self.call.job

    def whole(self, whole: Whole, usage: Usage) -> t.TrlRollouts:
        answers = [answer for _, answer in whole.choices()]
        wanted = self.call.request.logprobs
        values = ids = None
        if wanted is not None:
            pairs = [[_pairs(item, wanted) for item in answer.logprobs] for answer in answers]
            values = [[[value for _, value in one] for one in each] for each in pairs]
            ids = [[[token for token, _ in one] for one in each] for each in pairs]
        prompts = [list(tokens) for tokens in self.job.prompts]
        return t.TrlRollouts(prompts, [answer.token_ids for answer in answers], values, ids)

    def events(self, run: Run) -> AsyncIterator[list[Event]]:
        raise ApiError(400, "rollouts are not streamed", "invalid_request")


async def generate(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.RolloutRequest)
    fields = msgspec.structs.asdict(request.sampling_params)
    prompt_logprobs = fields.pop("prompt_logprobs")
    tokens: list[str | int | list[int]] = [*request.token_ids]
    completion = p.CompletionRequest(
        prompt=tokens, model=request.model, cache_salt=request.cache_salt, priority=request.priority, **fields
    )
    call = await prepare_completion(context, completion, tenant_of(scope), prompt_logprobs)
    await run_call(context, RolloutCall(call, request.request_id or call.id), scope, receive, send)


async def generate_trl(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.TrlRequest)
    prompts = [tokens for _, tokens in await read_prompts(context, request.prompts, True)]  # type: ignore[arg-type]
    if request.truncate_prompt_tokens is not None:
        room = max(context.max_model_len - request.max_tokens, 1)
        most = room if request.truncate_prompt_tokens == -1 else request.truncate_prompt_tokens
        prompts = [tokens[-most:] if most else [] for tokens in prompts]
    if context.allow_updates:
        await _control(context, scope, receive, Control("", "take"))
    names = ("n", "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_tokens", "logprobs")
    fields = {name: getattr(request, name) for name in names} | (request.generation_kwargs or {})
    if request.structured_outputs_regex is not None:
        fields["structured_outputs"] = {"regex": request.structured_outputs_regex}
    body = {"prompt": prompts, **{name: value for name, value in fields.items() if value is not None}}
    completion = decode(msgspec.json.encode(body), p.CompletionRequest)
    await run_call(
        context, TrlCall(await prepare_completion(context, completion, tenant_of(scope))), scope, receive, send
    )


async def pause(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    query = parse_qs(scope["query_string"].decode("latin-1"))
    mode = query.get("mode", ["abort"])[-1]
    if mode not in MODES:
        raise bad_request(f"mode is keep (requests wait) or abort (they end), not {mode!r}", "mode")
    await send_json(send, await _control(context, scope, receive, Control("", "pause", mode == "abort")))
    if query.get("clear_cache", ["false"])[-1].lower() in ("true", "1"):
        await _control(context, scope, receive, Control("", "reset"))


async def resume(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, await _control(context, scope, receive, Control("", "resume")))


async def update_weights(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.WeightUpdate)
    control = Control("", "update", path=request.weight_dir)
    await send_json(send, await _control(context, scope, receive, control))


async def reset(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    await _control(context, scope, receive, Control("", "take"))
    await send_json(send, await _control(context, scope, receive, Control("", "reset")))


async def sleep(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    query = parse_qs(scope["query_string"].decode("latin-1"))
    level, mode = query.get("level", ["1"])[-1], query.get("mode", ["keep"])[-1]
    if level not in ("1", "2"):
        raise bad_request(f"level is 1 (the cache) or 2 (the cache and the weights), not {level!r}", "level")
    if mode not in MODES:
        raise bad_request(f"mode is keep (requests wait) or abort (they end), not {mode!r}", "mode")
    control = Control("", "sleep", mode == "abort", level=int(level))
    await send_json(send, await _control(context, scope, receive, control))


async def wake_up(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    tags = parse_qs(scope["query_string"].decode("latin-1")).get("tags")
    await send_json(send, await _control(context, scope, receive, Control("", "wake", tags=tags)))


async def is_sleeping(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    done = await _controlled(context, scope, receive, Control("", "look"))
    await send_json(send, t.SleepStatus(done.is_sleeping))


async def world_size(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, t.WorldSize())


async def init_communicator(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.Communicator)
    control = Control(
        "", "join", host=request.host, port=request.port, world_size=request.world_size,
        backend=request.backend or "", trainer_uuid=request.client_device_uuid or "",
    )  # fmt: skip
    await send_json(send, await _control(context, scope, receive, control))


async def update_named_param(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), t.NamedTensor)
    control = Control("", "expect", name=request.name, dtype=request.dtype, shape=request.shape)
    await send_json(send, await _control(context, scope, receive, control))


async def close_communicator(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    await _control(context, scope, receive, Control("", "take"))
    await send_json(send, await _control(context, scope, receive, Control("", "leave")))


async def health(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, {"status": "ok"})


async def _control(context: ServerContext, scope: Scope, receive: Receive, control: Control) -> t.WeightStatus:
    return t.WeightStatus((await _controlled(context, scope, receive, control)).weight_version)


async def _controlled(context: ServerContext, scope: Scope, receive: Receive, control: Control) -> Controlled:
    if not context.allow_updates:
        message = "clients may not change the weights or pause this server: start it with --allow-updates"
        raise ApiError(403, message, "updates_not_allowed")
    work = asyncio.ensure_future(context.engine.control(control))
    try:
        done: Controlled = await unless_gone(work, receive, context.limits.request_timeout)
    except EngineFaultError as fault:
        raise api_error(fault) from fault
    return done


def _logprob(item: TokenLogprob) -> t.RolloutLogprob:
    top = [t.RolloutLogprob(f"token_id:{token}", value) for token, value in item.top]
    return t.RolloutLogprob(f"token_id:{item.token_id}", item.logprob, top)


def _prompt_logprob(item: TokenLogprob) -> dict[str, t.PromptLogprob]:
    others = {str(token): t.PromptLogprob(value) for token, value in item.top if token != item.token_id}
    return {str(item.token_id): t.PromptLogprob(item.logprob, item.rank), **others}


def _pairs(item: TokenLogprob, wanted: int) -> list[tuple[int, float]]:
    """The most likely tokens, best first, or the sampled one alone."""
    return list(item.top[:wanted]) if wanted else [(item.token_id, item.logprob)]


ROUTES: tuple[RouteRow, ...] = (
    ("/inference/v1/generate", "POST", generate),
    ("/pause", "POST", pause),
    ("/resume", "POST", resume),
    ("/update_weights", "POST", update_weights),
    ("/sleep", "POST", sleep),
    ("/wake_up", "POST", wake_up),
    ("/is_sleeping", "GET", is_sleeping),
    ("/reset_prefix_cache", "POST", reset),
    ("/reset_prefix_cache/", "POST", reset),
    ("/get_world_size", "GET", world_size),
    ("/get_world_size/", "GET", world_size),
    ("/health/", "GET", health),
    ("/generate/", "POST", generate_trl),
    ("/init_communicator/", "POST", init_communicator),
    ("/update_named_param/", "POST", update_named_param),
    ("/close_communicator/", "POST", close_communicator),
)
