"""`/completion`, `/infill`, `/props` and `/slots` of llama.cpp's server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from bifolio import __version__
from bifolio.errors import RequestError, did_you_mean
from bifolio.images import PromptImage
from bifolio.serve.http.auth import Receive, Scope, Send
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import bad_request
from bifolio.serve.http.events import Event, encode_json_event
from bifolio.serve.http.exchange import SSE_HEADERS, Framing, decode, read_body, send_json
from bifolio.serve.http.generation import Job, Run
from bifolio.serve.http.images import MEDIA, media_prompt
from bifolio.serve.http.running import run_call, tenant_of
from bifolio.serve.http.sampling import request_defaults
from bifolio.serve.http.whole_answers import Answer, Whole
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.protocols.adapters import named, names_by_id
from bifolio.serve.protocols.common import RouteRow, given, refuse_others
from bifolio.serve.protocols.completions import CompletionCall
from bifolio.serve.protocols.completions import prepare as prepare_completion
from bifolio.serve.protocols.llama_cpp_types import NEUTRAL, InfillRequest, LlamaCppRequest, MediaPrompt
from bifolio.serve.protocols.openai_answers import Usage
from bifolio.serve.views.live import LOOK_TIMEOUT, visible_entry
from bifolio.text.infill import ContextFile

EVENTS = Framing(SSE_HEADERS, b"", lambda error: b"error: " + error.body("/completion") + b"\n\n")
STOP_TYPES = {"length": "limit", "stop": "eos"}
SAME_NAME = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty", "dry_multiplier",
    "dry_base", "dry_allowed_length", "dry_sequence_breakers", "xtc_probability", "xtc_threshold", "stop", "stream",
    "ignore_eos",
)  # fmt: skip
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
SAMPLERS: dict[str, dict[str, float]] = {  # the options that switch each of them off
    "penalties": NO_PENALTIES,
    "dry": {"dry_multiplier": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0},
}
OTHER_NAMES = {"typical_p": "typ_p"}
NO_SAMPLERS = ("top_n_sigma", "infill", "adaptive_p")  # accepted in a list of samplers: they are off here


def completion_request(request: LlamaCppRequest) -> p.CompletionRequest:
    """The same request in the internal form."""
    options = given(**{name: getattr(request, name) for name in SAME_NAME})
    options |= given(repetition_penalty=request.repeat_penalty, model=request.model)
    if request.repeat_last_n == 0:
        options |= NO_PENALTIES
    if request.dry_penalty_last_n is not None:
        options |= {"dry_range": request.dry_penalty_last_n} if request.dry_penalty_last_n > 0 else {}
        options |= {"dry_multiplier": 0.0} if request.dry_penalty_last_n == 0 else {}
    if request.samplers is not None:
        options |= _switched_off(request.samplers)
    if request.seed is not None and request.seed >= 0:
        options["seed"] = request.seed
    if request.logit_bias:
        options["logit_bias"] = {str(int(token)): float(bias) for token, bias in request.logit_bias}
    if request.json_schema is not None:
        schema = p.JsonSchemaFormat(schema=request.json_schema)
        options["response_format"] = p.ResponseFormat(type="json_schema", json_schema=schema)
    limit = None if request.n_predict < 0 else request.n_predict
    prompt: Any = "" if isinstance(request.prompt, MediaPrompt) else request.prompt
    return p.CompletionRequest(prompt=prompt, max_tokens=limit, **options)


def _switched_off(samplers: list[str]) -> dict[str, float]:
    """The options of the samplers that a list leaves out."""
    wanted = {OTHER_NAMES.get(name, name) for name in samplers}
    for name in wanted - {*SAMPLERS, *NO_SAMPLERS}:
        hint = did_you_mean(name, [*SAMPLERS, *NO_SAMPLERS]) or f": choose from {', '.join(SAMPLERS)}"
        raise bad_request(f"samplers has {name!r}, which is none{hint}", "samplers")
    return {option: value for name, off in SAMPLERS.items() if name not in wanted for option, value in off.items()}


@dataclass(slots=True)
class LlamaCppCall:
    """One request, and the shapes of its answer."""

    context: ServerContext
    request: LlamaCppRequest
    inner: CompletionCall
    is_cut: bool = False  # the prompt of an infill was longer than the context

    @property
    def job(self) -> Job:
        return self.inner.job

    def whole(self, whole: Whole, usage: Usage) -> dict[str, Any]:
        answer = whole.answers[0]
        tokens = answer.token_ids if self.request.return_tokens else []
        body = {"index": 0, "content": answer.text, "tokens": tokens} | self._ending(answer, usage, None)
        return self._wanted(body)

    async def events(self, run: Run) -> AsyncIterator[list[Event]]:
        while batch := await run.next():
            events: list[Event] = []
            for piece in (piece for news in batch for piece in news.pieces):
                tokens = piece.token_ids if self.request.return_tokens else []
                body: dict[str, Any] = {"index": 0, "content": piece.text, "tokens": tokens, "stop": False}
                if self.request.timings_per_token:
                    body["timings"] = _timings(run.usage(), None)
                if piece.finish_reason is not None:
                    answer = Answer()
                    answer.add(piece)
                    body = self._wanted(body | self._ending(answer, run.usage(), run))
                events.append(encode_json_event(body))
            yield events

    def _ending(self, answer: Answer, usage: Usage, run: Run | None) -> dict[str, Any]:
        word = answer.stop_reason if isinstance(answer.stop_reason, str) else ""
        return {
            "id_slot": 0,
            "stop": True,
            "model": self.job.model,
            "tokens_predicted": usage.completion_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.prompt_tokens_details.cached_tokens,
            "generation_settings": _settings(self.context),
            "prompt": self.request.prompt if isinstance(self.request.prompt, str) else "",
            "truncated": self.is_cut,
            "stop_type": "word" if word else STOP_TYPES.get(answer.finish_reason or "", "none"),
            "stopping_word": word,
            "timings": _timings(usage, run),
        }

    def _wanted(self, body: dict[str, Any]) -> dict[str, Any]:
        """The fields of the answer that the request names, under the last parts of their names; all without names."""
        if not self.request.response_fields:
            return body
        found = {}
        for path in self.request.response_fields:
            value: Any = body
            for name in path.split("/"):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                found[path.rpartition("/")[2]] = value
        return found


def _timings(usage: Usage, run: Run | None) -> dict[str, float]:
    """Numbers of tokens, and the times of a request that has ended."""
    ended = None if run is None else run.ended
    timings: dict[str, float] = {
        "prompt_n": usage.prompt_tokens,
        "predicted_n": usage.completion_tokens,
        "cache_n": usage.prompt_tokens_details.cached_tokens,
    }
    if ended is not None:
        timings |= {"prompt_ms": 1000 * ended.prefill_time, "predicted_ms": 1000 * ended.decode_time}
    return timings


def _settings(context: ServerContext) -> dict[str, Any]:
    """The sampling values of requests that set none, under llama.cpp's names."""
    defaults: dict[str, Any] = dict(request_defaults(context.model.sampling_defaults))
    defaults["repeat_penalty"] = defaults.pop("repetition_penalty")
    return {**defaults, "n_predict": -1, "seed": -1}


async def completion(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), LlamaCppRequest)
    check_supported(request)
    wanted, tenant = completion_request(request), tenant_of(scope)
    images: tuple[PromptImage, ...] = ()
    if isinstance(request.prompt, MediaPrompt):
        data = [(f"multimodal_data[{number}]", each) for number, each in enumerate(request.prompt.multimodal_data)]
        tokens, images = await media_prompt(context, request.prompt.prompt_string, data, tenant)
        wanted.prompt = [*tokens]
    inner = await prepare_completion(context, wanted, tenant)
    inner.job.images = images
    set_adapters(context, request, inner.job)
    await run_call(context, LlamaCppCall(context, request, inner), scope, receive, send, EVENTS)


async def infill(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    """A text with a gap. Text far from the gap is left out where all does not fit, and the answer says so."""
    request = decode(await read_body(scope, receive, context.limits), InfillRequest)
    check_supported(request)
    try:
        marks = context.model.require_infill()
    except RequestError as error:
        raise bad_request(str(error), "input_suffix") from error
    files = [ContextFile(file.filename, file.text) for file in request.input_extra or []]
    prefix, suffix, longest = request.input_prefix + request.prompt, request.input_suffix, context.max_model_len
    output = longest // 4 if request.n_predict < 0 else min(request.n_predict, longest - 1)
    tokenizer = context.tokenizers.tokenizer
    tokens, is_cut = await context.tokenizers.run(
        lambda: marks.prompt_with_context(tokenizer, prefix, suffix, files, longest - output),
        len(prefix) + len(suffix) + sum(len(file.text) for file in files),
    )
    completion = completion_request(request)
    completion.prompt = [*tokens]
    completion.stop_token_ids = None if request.ignore_eos else list(marks.ends)
    inner = await prepare_completion(context, completion, tenant_of(scope))
    set_adapters(context, request, inner.job)
    await run_call(context, LlamaCppCall(context, request, inner, is_cut), scope, receive, send, EVENTS)


def set_adapters(context: ServerContext, request: LlamaCppRequest, job: Job) -> None:
    """The adapters that a request names by their numbers."""
    if request.lora is None:
        return
    names = names_by_id(context)
    job.adapters = [(named(names, each), each.scale) for each in request.lora]


def check_supported(request: LlamaCppRequest) -> None:
    if request.n_probs:
        raise bad_request("n_probs is not supported here: use logprobs of /v1/completions", "n_probs")
    refuse_others(request, NEUTRAL)


async def props(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    hello, special = context.engine.hello, context.model.special_tokens
    await send_json(
        send,
        {
            "default_generation_settings": {"params": _settings(context), "n_ctx": context.max_model_len},
            "total_slots": 0 if hello is None else hello.max_num_seqs,
            "model_alias": context.name,
            "model_path": context.name,
            "chat_template": context.model.chat_template or "",
            "bos_token": special.get("bos_token", ""),
            "eos_token": special.get("eos_token", ""),
            "modalities": {"vision": context.model.vision is not None, "audio": False},
            "media_marker": MEDIA,
            "build_info": f"bifolio {__version__}",
        },
    )


async def slots(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    """Every slot; the numbers of requests of other keys are hidden."""
    async with asyncio.timeout(LOOK_TIMEOUT):
        found = await context.engine.snapshot()
    tenant = tenant_of(scope)
    taken = {entry["slot"]: visible_entry(entry, tenant) for entry in found.slots}
    count = 0 if context.engine.hello is None else context.engine.hello.max_num_seqs
    await send_json(send, [_slot(number, taken.get(number), context) for number in range(count)])


def _slot(number: int, entry: dict[str, Any] | None, context: ServerContext) -> dict[str, Any]:
    seen = entry or {}
    return {
        "id": number,
        "id_task": seen.get("id", ""),
        "n_ctx": context.max_model_len,
        "is_processing": entry is not None,
        "n_prompt_tokens": seen.get("prompt", 0),
        "next_token": [{"n_decoded": seen.get("generated", 0), "n_remain": -1}],
    }


ROUTES: tuple[RouteRow, ...] = (
    ("/completion", "POST", completion),
    ("/infill", "POST", infill),
    ("/props", "GET", props),
    ("/slots", "GET", slots),
)
