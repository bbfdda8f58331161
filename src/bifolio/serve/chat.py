"""`/v1/chat/completions`."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bifolio.serve.auth import Tenant
from bifolio.serve.completions import LOWEST
from bifolio.serve.context import ServerContext
from bifolio.serve.errors import bad_request
from bifolio.serve.events import Event, TextEvents
from bifolio.serve.generation import Answer, Job, Piece, Run, Scores, Whole
from bifolio.serve.helper_messages import Failed, Render
from bifolio.serve.protocol import ChatRequest, Message, StreamOptions
from bifolio.serve.responses import (
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    TopLogprob,
    Usage,
)
from bifolio.serve.sampling import EngineParams, engine_params, resolve_strings
from bifolio.serve.steps import watched_steps
from bifolio.serve.tools import CallScanner, ToolPlan, called, plan_tools, read_call
from bifolio.text.roles import Placeholders

RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "template", "special_tokens"})


@dataclass(slots=True)
class _Choice:
    """The state of one choice of a stream."""

    scanner: CallScanner | None
    forced: str | None = None  # text of a call that must be one, gathered until it is complete
    sent_role: bool = False
    num_calls: int = 0


@dataclass(slots=True)
class ChatCall:
    """One request, and the shapes of its answer."""

    context: ServerContext
    request: ChatRequest
    tools: ToolPlan
    job: Job
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _choices: dict[int, _Choice] = field(default_factory=dict)

    # -- whole -------------------------------------------------------------------------------------------------------
    def whole(self, whole: Whole, usage: Usage) -> ChatCompletion:
        choices = [self._choice(index, answer) for index, answer in enumerate(whole.answers)]
        return ChatCompletion(self.id, "chat.completion", self.created, self.context.name, choices, usage)

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        text, calls = self._split(answer.text)
        message = ChatMessage("assistant", text if text or not calls else None)
        reason = answer.finish_reason
        if calls:
            message.tool_calls = calls
            reason = "tool_calls" if reason == "stop" else reason
        choice = ChatChoice(index, message, None, reason, stop_reason=answer.stop_reason)
        if self.request.logprobs:
            choice.logprobs = ChatLogprobs(self._logprobs(answer.logprobs))
        if self.request.return_token_ids:
            choice.token_ids = answer.token_ids
        if self.request.beam_search is not None:
            choice.beam = answer.beam()
        return choice

    def _split(self, text: str) -> tuple[str, list[CalledTool]]:
        """(plain text, calls) of a whole answer."""
        if self.tools.schema is not None:
            call = read_call(text)
            return (text, []) if call is None else ("", [called(*call)])
        if not self.tools.is_watched:
            return text, []
        scanner = self._scanner()
        plain = scanner.push(text) + scanner.finish()
        return plain.strip() if scanner.found else plain, [called(*call) for call in scanner.found]

    def _scanner(self) -> CallScanner:
        return CallScanner(frozenset(tool.function.name for tool in self.request.tools or []))

    # -- in pieces -----------------------------------------------------------------------------------------------------
    async def events(self, run: Run) -> AsyncIterator[list[Event]]:
        """Chunks for a stream, all that are ready at a time: the role first, then text or calls, then the usage."""
        wants_usage = self.request.stream_options is not None and self.request.stream_options.include_usage
        usage: msgspec.UnsetType | None = None if wants_usage else msgspec.UNSET
        template = TextEvents(self._chunk(ChatChunkChoice(0, ChatDelta(content="")), usage), b'"content":""')
        while batch := await run.next():
            events: list[Event] = []
            for news in batch:
                steps = watched_steps(news.update, 0, self.context.texts)
                if steps is not None:
                    empty = ChatChunk(self.id, "chat.completion.chunk", self.created, self.context.name, [], usage)
                    events.append(msgspec.structs.replace(empty, steps=steps))
                for piece in news.pieces:
                    if self._is_plain(piece):
                        events += [template.event(piece.text)] if piece.text else []
                    else:
                        events += [self._chunk(chunk, usage) for chunk in self._chunks(piece)]
            yield events
        if wants_usage:
            yield [ChatChunk(self.id, "chat.completion.chunk", self.created, self.context.name, [], run.usage())]

    def _is_plain(self, piece: Piece) -> bool:
        """Whether a chunk of the first choice has text alone."""
        request, state = self.request, self._choices.get(0)
        if piece.index or state is None or state.scanner is not None or state.forced is not None:
            return False
        is_text = piece.finish_reason is None and not request.logprobs and not request.return_token_ids
        return is_text and not self.job.params.drop_output

    def _chunk(self, choice: ChatChunkChoice, usage: msgspec.UnsetType | None) -> ChatChunk:
        return ChatChunk(self.id, "chat.completion.chunk", self.created, self.context.name, [choice], usage)

    def _chunks(self, piece: Piece) -> list[ChatChunkChoice]:
        state = self._choices.get(piece.index)
        if state is None:
            state = self._choices[piece.index] = _Choice(
                self._scanner() if self.tools.is_watched else None, "" if self.tools.schema is not None else None
            )
        chunks = []
        if not state.sent_role:
            state.sent_role = True
            chunks.append(ChatChunkChoice(piece.index, ChatDelta("assistant", "")))
        if self.job.params.drop_output:
            piece = Piece(piece.index, "", [], finish_reason="length")
        delta = self._delta(state, piece)
        chunk = ChatChunkChoice(piece.index, delta)
        if self.request.logprobs and piece.logprobs:
            chunk.logprobs = ChatLogprobs(self._logprobs(piece.logprobs))
        if self.request.return_token_ids:
            chunk.token_ids = piece.token_ids
        if piece.finish_reason is not None:
            calls = state.num_calls and piece.finish_reason == "stop"
            chunk.finish_reason = "tool_calls" if calls else piece.finish_reason
            chunk.stop_reason = piece.stop_reason
        if delta.content or delta.tool_calls or chunk.logprobs or chunk.finish_reason or self.request.return_token_ids:
            chunks.append(chunk)
        return chunks

    def _delta(self, state: _Choice, piece: Piece) -> ChatDelta:
        """The text or the calls that are certain now."""
        ended = piece.finish_reason is not None
        if state.forced is not None:
            state.forced += piece.text
            call = read_call(state.forced) if ended else None
            if call is not None:
                state.num_calls = 1
                return ChatDelta(tool_calls=[called(*call, 0)])
            return ChatDelta(content=state.forced) if ended and state.forced else ChatDelta()
        text = piece.text
        if state.scanner is None:
            return ChatDelta(content=text) if text else ChatDelta()
        text = state.scanner.push(text) + (state.scanner.finish() if ended else "")
        delta = ChatDelta(content=text) if text else ChatDelta()
        if len(state.scanner.found) > state.num_calls:
            fresh = state.scanner.found[state.num_calls :]
            delta.tool_calls = [called(*call, state.num_calls + number) for number, call in enumerate(fresh)]
            state.num_calls = len(state.scanner.found)
        return delta

    def _logprobs(self, scored: Scores) -> list[ChatTokenLogprob]:
        wanted = self.request.top_logprobs or 0
        return [
            ChatTokenLogprob(
                self.context.texts.text(item.token_id),
                max(item.logprob, LOWEST),
                list(self.context.texts.raw(item.token_id)),
                [self._rival(rival, value) for rival, value in item.top[:wanted]],
            )
            for item in scored
        ]

    def _rival(self, token_id: int, logprob: float) -> TopLogprob:
        texts = self.context.texts
        return TopLogprob(texts.text(token_id), max(logprob, LOWEST), list(texts.raw(token_id)))


async def prepare(context: ServerContext, request: ChatRequest, tenant: Tenant) -> ChatCall:
    """Check a request and turn it into a job."""
    context.check_model(request.model)
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    tools = plan_tools(request, context.model.chat_template)
    prompt = await chat_tokens(context, request, tools, tenant)
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    params = engine_params(
        request,
        context.model.sampling_defaults,
        max_tokens=limit,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    if tools.schema is not None:
        if params.grammar is not None:
            raise bad_request("a tool call and a response_format cannot both be enforced", "tool_choice")
        params = EngineParams(params.values, ("json_schema", tools.schema), params.is_beam_search, params.drop_output)
    drawn = request.beam_search.width if request.beam_search else request.n
    params = await resolve_strings(context, params)
    if params.grammar is not None:
        await context.grammars.require(*params.grammar, tenant.name)
    context.check_scored([prompt], drawn, params)
    stream_options = request.stream_options or StreamOptions()
    job = Job(
        tenant,
        [prompt],
        params,
        request.n,
        request.stream,
        request.priority,
        request.cache_salt,
        request.timeout,
        drawn,
        stream_options.include_steps,
        stream_options.interval_ms / 1000,
    )
    return ChatCall(context, request, tools, job)


async def chat_tokens(context: ServerContext, request: ChatRequest, tools: ToolPlan, tenant: Tenant) -> list[int]:
    """The conversation in the model's own form; special tokens come from the template alone."""
    variables = request.chat_template_kwargs or {}
    if RESERVED & variables.keys():
        raise bad_request(f"chat_template_kwargs may not set {sorted(RESERVED)}", "chat_template_kwargs")
    messages = [as_template_message(message) for message in request.messages]
    if context.model.chat_template is None:
        raise bad_request("this model has no chat template: use /v1/completions", "messages", "chat_template")
    placeholders = Placeholders(context.tokenizers.tokenizer.special_tokens)
    task = Render(
        placeholders.protect(messages),
        placeholders.protect(tools.shown),
        request.add_generation_prompt,
        placeholders.protect({name: value for name, value in variables.items() if name.isidentifier()}),
    )
    outcome = await context.templates.ask(task, tenant.name)
    if isinstance(outcome, Failed):
        slow = outcome.kind == "Killed"
        message = "the chat template takes too much time or memory" if slow else outcome.message
        raise bad_request(message, "messages", "chat_template")
    return await context.tokenizers.encode_parts(placeholders.parts(outcome.text), context.max_model_len)


def as_template_message(message: Message) -> dict[str, Any]:
    """As templates expect it: text as one string, arguments of calls as objects."""
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": content or ""}
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return result


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
