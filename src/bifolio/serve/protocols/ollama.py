"""ollama's `/api/generate`, `/api/chat`, `/api/embed` and `/api/version`."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from bifolio import __version__
from bifolio.api.messages import Pooling
from bifolio.images import TEXT_ONLY
from bifolio.serve.http.auth import Receive, Scope, Send, Tenant
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import bad_request
from bifolio.serve.http.events import Event
from bifolio.serve.http.exchange import Framing, decode, read_body, send_json
from bifolio.serve.http.generation import Job, Run, Scores
from bifolio.serve.http.running import run_call, tenant_of
from bifolio.serve.http.turn import Turn, prepare
from bifolio.serve.http.whole_answers import Whole
from bifolio.serve.protocols import openai_types as p
from bifolio.serve.protocols.chat import token_logprobs
from bifolio.serve.protocols.common import RouteRow, given, json_line, refuse_others
from bifolio.serve.protocols.completions import prepare as prepare_completion
from bifolio.serve.protocols.embeddings import encoded, pooled, shown
from bifolio.serve.protocols.ollama_models import ROUTES as MODEL_ROUTES
from bifolio.serve.protocols.ollama_types import (
    NEUTRAL,
    EmbedRequest,
    GenerateRequest,
    OldEmbedRequest,
    OllamaBase,
    OllamaChatRequest,
    OllamaMessage,
)
from bifolio.serve.protocols.openai_answers import Usage
from bifolio.text.reasoning import PlainReader, reasoning_format
from bifolio.text.strict_json import write_json
from bifolio.text.tools import tool_format
from bifolio.text.tools.events import AnswerReader, Arguments, Call, Content, Part, Reasoning, merged

NDJSON = Framing(
    [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")],
    b"",
    lambda error: error.body("/api/") + b"\n",
)
SAME_NAME = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "presence_penalty", "frequency_penalty",
             "stop")  # fmt: skip
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


# -- requests -------------------------------------------------------------------------------------------------------
def _sampling(request: OllamaBase) -> dict[str, Any]:
    """The options that both kinds of request share, under the internal names."""
    options = request.options
    found: dict[str, Any] = {"stream": request.stream}
    if options is not None:
        refuse_others(options, NEUTRAL)
        found |= given(**{name: getattr(options, name) for name in SAME_NAME})
        found |= given(repetition_penalty=options.repeat_penalty)
        if options.repeat_last_n == 0:
            found |= NO_PENALTIES
    limit = None if options is None else options.num_predict
    found["max_tokens"] = None if limit is None or limit < 0 else limit
    if request.format == "json":
        found["response_format"] = p.ResponseFormat(type="json_object")
    elif isinstance(request.format, dict):
        schema = p.JsonSchemaFormat(schema=request.format)
        found["response_format"] = p.ResponseFormat(type="json_schema", json_schema=schema)
    return found


def _chat(request: OllamaBase, messages: Sequence[OllamaMessage], context: ServerContext) -> p.ChatRequest:
    template = context.model.chat_template
    reasons = reasoning_format(template) is not None or tool_format(template).has_channels
    effort = None
    if request.think is not None and reasons:
        effort = {True: "medium", False: "none"}.get(request.think, request.think)  # type: ignore[arg-type]
    elif request.think:
        raise bad_request(f"{context.name!r} does not support thinking: leave think out", "think")
    for number, message in enumerate(messages):
        if message.images and context.model.vision is None:
            raise bad_request(f"messages[{number}].images: {TEXT_ONLY}", "images")
    tools = request.tools if isinstance(request, OllamaChatRequest) else None
    return p.ChatRequest(
        model=request.model.removesuffix(":latest"),
        messages=_messages(messages),
        tools=tools or None,
        **given(reasoning_effort=effort, logprobs=request.logprobs, top_logprobs=request.top_logprobs),
        **_sampling(request),
    )


def _messages(messages: Sequence[OllamaMessage]) -> list[p.Message]:
    """Calls get ids by their place, and results refer to the calls before them in order."""
    found: list[p.Message] = []
    waiting: list[str] = []
    for place, message in enumerate(messages):
        calls = []
        for number, call in enumerate(message.tool_calls or []):
            name = call.id or f"call_{place}_{number}"
            arguments = write_json(call.function.arguments)
            calls.append(p.ToolCall(id=name, function=p.FunctionCall(name=call.function.name, arguments=arguments)))
            waiting.append(name)
        answered = message.tool_call_id
        if message.role == "tool" and answered is None and waiting:
            answered = waiting.pop(0)
        found.append(
            p.Message(
                role=message.role,
                content=_content(message),
                name=message.tool_name,
                tool_calls=calls or None,
                tool_call_id=answered,
                reasoning_content=message.thinking,
            )
        )
    return found


def _content(message: OllamaMessage) -> str | list[p.ContentPart]:
    """The text, behind its images."""
    if not message.images:
        return message.content or ""
    images = [p.ContentPart(type="image_url", image_url=f"data:image/png;base64,{data}") for data in message.images]
    return [*images, p.ContentPart(type="text", text=message.content or "")]


# -- answers ----------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class OllamaCallShape:
    """One request, and the shapes of its answer: `is_chat` messages, else plain responses."""

    context: ServerContext
    job: Job
    is_chat: bool
    request: OllamaBase
    turn: Turn | None = None  # None: text alone
    began: float = field(default_factory=time.perf_counter)
    run: Run | None = None

    def _reader(self) -> AnswerReader:
        return PlainReader() if self.turn is None else self.turn.reader()

    def whole(self, whole: Whole, usage: Usage) -> dict[str, Any]:
        answer, reader = whole.answers[0], self._reader()
        parts = merged([*reader.push(answer.text), *reader.finish()])
        content = "".join(part.text for part in parts if isinstance(part, Content))
        thinking = "".join(part.text for part in parts if isinstance(part, Reasoning))
        body = self._line(content, thinking, _calls(parts)) | self._scores(answer.logprobs)
        return body | self._ending(answer.finish_reason, usage, None)

    async def events(self, run: Run) -> AsyncIterator[list[Event]]:
        reader, held, scores = self._reader(), list[Part](), Scores()
        while batch := await run.next():
            events: list[Event] = []
            for piece in (piece for news in batch for piece in news.pieces):
                scores += piece.logprobs
                parts = reader.push(piece.text)
                if piece.finish_reason is not None:
                    parts = [*parts, *reader.finish()]
                for part in merged(parts):
                    if isinstance(part, Call | Arguments):
                        held.append(part)  # a call is sent whole
                    else:
                        text = part.text
                        line = self._line("", text) if isinstance(part, Reasoning) else self._line(text, "")
                        events.append(json_line(line | self._scores(scores) | {"done": False}))
                        scores = Scores()  # they come with the first text after their tokens
                if piece.finish_reason is not None:
                    if held:
                        events.append(json_line(self._line("", "", _calls(merged(held))) | {"done": False}))
                    last = self._line("", "") | self._scores(scores)
                    events.append(json_line(last | self._ending(piece.finish_reason, run.usage(), run)))
            yield events

    def _line(self, content: str, thinking: str, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.job.model, "created_at": now()}
        extra = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        if self.is_chat:
            return body | {"message": {"role": "assistant", "content": content, **extra}}
        return body | {"response": content, **extra}

    def _scores(self, scores: Scores) -> dict[str, Any]:
        """The logprobs of tokens, where the request asks for them."""
        if not self.request.logprobs or not scores:
            return {}
        return {"logprobs": token_logprobs(self.context.texts, scores, self.request.top_logprobs or 0)}

    def _ending(self, reason: str | None, usage: Usage, run: Run | None) -> dict[str, Any]:
        total = time.perf_counter() - self.began
        ended = None if run is None else run.ended
        decode_time = total if ended is None else ended.decode_time
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": _nanoseconds(total),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": 0 if ended is None else _nanoseconds(ended.prefill_time),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(decode_time),
        }


def _calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Call):
            calls.append({"function": {"name": part.name, "arguments": {}}})
        elif isinstance(part, Arguments):
            try:
                calls[-1]["function"]["arguments"] = json.loads(part.text)
            except (ValueError, RecursionError):  # a call that was cut by num_predict
                calls.pop()
    return calls


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


# -- handlers ---------------------------------------------------------------------------------------------------------
async def generate(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    """A prompt, through the chat template where the model has one and `raw` is not set."""
    request = decode(await read_body(scope, receive, context.limits), GenerateRequest)
    context.check_model(request.model.removesuffix(":latest"))
    for name in ("template", "context"):
        if getattr(request, name):
            raise bad_request(f"{name} is not supported: leave it out", name)
    if not request.prompt and not request.suffix:  # asks to load the model
        await send_json(send, {"model": context.name, "created_at": now(), "response": "", "done": True,
                               "done_reason": "load"})  # fmt: skip
        return
    tenant = tenant_of(scope)
    if request.raw and request.system:
        raise bad_request("a raw prompt has no system prompt: leave one of them out", "system")
    if request.suffix and request.system:
        raise bad_request("a text with a suffix has no system prompt: leave one of them out", "system")
    if request.raw or request.suffix or context.model.chat_template is None:
        if request.images:
            raise bad_request("images need the chat template: leave raw and suffix out", "images")
        call = await _completion(context, request, tenant)
    else:
        messages = [OllamaMessage(role="user", content=request.prompt, images=request.images)]
        if request.system:
            messages.insert(0, OllamaMessage(role="system", content=request.system))
        turn = await prepare(context, _chat(request, messages, context), tenant)
        call = OllamaCallShape(context, turn.job, False, request, turn)
    await run_call(context, call, scope, receive, send, NDJSON)


async def _completion(context: ServerContext, request: GenerateRequest, tenant: Tenant) -> OllamaCallShape:
    text = f"{request.system}\n\n{request.prompt}" if request.system else request.prompt
    if request.think:
        raise bad_request("a text without the chat template has no marked reasoning: leave think out", "think")
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    scores = (request.top_logprobs or 0) if request.logprobs else None
    model = request.model.removesuffix(":latest")
    completion = p.CompletionRequest(
        model=model, prompt=text, suffix=request.suffix, logprobs=scores, **_sampling(request)
    )
    prepared = await prepare_completion(context, completion, tenant)
    return OllamaCallShape(context, prepared.job, False, request)


async def chat(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), OllamaChatRequest)
    context.check_model(request.model.removesuffix(":latest"))
    if not request.messages:  # asks to load the model
        message = {"role": "assistant", "content": ""}
        await send_json(send, {"model": context.name, "created_at": now(), "message": message, "done": True,
                               "done_reason": "load"})  # fmt: skip
        return
    turn = await prepare(context, _chat(request, request.messages, context), tenant_of(scope))
    await run_call(context, OllamaCallShape(context, turn.job, True, request, turn), scope, receive, send, NDJSON)


async def embed(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    request = decode(await read_body(scope, receive, context.limits), EmbedRequest)
    name = request.model.removesuffix(":latest")
    context.check_model(name)
    began = time.perf_counter()
    inputs = await encoded(context, request.input, None if request.truncate is False else -1)
    most, longest = context.max_model_len, max(len(text.token_ids) for text in inputs)
    if longest > most:
        message = f"a text has {longest} tokens and the model takes {most}: shorten it, or leave out truncate: false"
        raise bad_request(message, "truncate", "context_length_exceeded")
    raw = await pooled(context, inputs, Pooling("embed", request.dimensions or None), scope, receive, name)
    count = sum(len(text.token_ids) for text in inputs)
    found = [shown(each, "float") for each in raw]
    body = {"model": context.name, "embeddings": found, "prompt_eval_count": count, "load_duration": 0}
    await send_json(send, body | {"total_duration": _nanoseconds(time.perf_counter() - began)})


async def embed_one(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    """The older form, of one text."""
    request = decode(await read_body(scope, receive, context.limits), OldEmbedRequest)
    name = request.model.removesuffix(":latest")
    context.check_model(name)
    texts = await encoded(context, request.prompt, -1, name="prompt")
    raw = await pooled(context, texts, Pooling(), scope, receive, name)
    await send_json(send, {"embedding": shown(raw[0], "float")})


async def version(context: ServerContext, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, {"version": __version__})


ROUTES: tuple[RouteRow, ...] = (
    ("/api/generate", "POST", generate),
    ("/api/chat", "POST", chat),
    ("/api/embed", "POST", embed),
    ("/api/embeddings", "POST", embed_one),
    ("/api/version", "GET", version),
    *MODEL_ROUTES,
)
