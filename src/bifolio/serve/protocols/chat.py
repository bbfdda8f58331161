"""`/v1/chat/completions`: the shapes of its answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec

from bifolio.serve.http.auth import Tenant
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.events import Event, TextEvents
from bifolio.serve.http.generation import Job, Piece, Run, Scores
from bifolio.serve.http.token_text import TokenTexts
from bifolio.serve.http.tools import new_call_id
from bifolio.serve.http.turn import Turn
from bifolio.serve.http.turn import prepare as prepare_turn
from bifolio.serve.http.whole_answers import Answer, Whole
from bifolio.serve.protocols.completions import LOWEST
from bifolio.serve.protocols.openai_answers import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatTokenLogprob,
    FunctionDelta,
    ToolDelta,
    TopLogprob,
    Usage,
)
from bifolio.serve.protocols.openai_types import ChatRequest
from bifolio.serve.views.steps import watched_steps
from bifolio.text.reasoning import PlainReader, texts_of
from bifolio.text.tools.events import AnswerReader, Arguments, Call, Part, Reasoning, merged


@dataclass(slots=True)
class _Choice:
    """The state of one choice of a stream."""

    reader: AnswerReader
    num_calls: int = 0


@dataclass(slots=True)
class ChatCall:
    """One request, and the shapes of its answer."""

    turn: Turn
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))
    _choices: dict[int, _Choice] = field(default_factory=dict)

    @property
    def job(self) -> Job:
        return self.turn.job

    @property
    def context(self) -> ServerContext:
        return self.turn.context

    @property
    def request(self) -> ChatRequest:
        return self.turn.request

    # -- whole -------------------------------------------------------------------------------------------------------
    def whole(self, whole: Whole, usage: Usage) -> ChatCompletion:
        choices = [self._choice(index, answer) for index, answer in whole.choices()]
        return ChatCompletion(self.id, "chat.completion", self.created, self.job.model, choices, usage)

    def _choice(self, index: int, answer: Answer) -> ChatChoice:
        reader = self.turn.reader()
        parts = merged([*reader.push(answer.text), *reader.finish()])
        reasoning, text = texts_of(parts)
        calls = called_tools(parts)
        message = ChatMessage("assistant", text if text or not calls else None)
        if reasoning:
            message.reasoning_content = reasoning
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
                    empty = ChatChunk(self.id, "chat.completion.chunk", self.created, self.job.model, [], usage)
                    events.append(msgspec.structs.replace(empty, steps=steps))
                for piece in news.pieces:
                    if self._is_plain(piece):
                        events += [template.event(piece.text)] if piece.text else []
                    else:
                        events += [self._chunk(chunk, usage) for chunk in self._chunks(piece)]
            yield events
        if wants_usage:
            yield [ChatChunk(self.id, "chat.completion.chunk", self.created, self.job.model, [], run.usage())]

    def _is_plain(self, piece: Piece) -> bool:
        """Whether a chunk of the first choice has text alone."""
        request, state = self.request, self._choices.get(0)
        if piece.index or state is None or not isinstance(state.reader, PlainReader):
            return False
        is_text = piece.finish_reason is None and not request.logprobs and not request.return_token_ids
        return is_text and not self.job.params.drop_output

    def _chunk(self, choice: ChatChunkChoice, usage: msgspec.UnsetType | None) -> ChatChunk:
        return ChatChunk(self.id, "chat.completion.chunk", self.created, self.job.model, [choice], usage)

    def _chunks(self, piece: Piece) -> list[ChatChunkChoice]:
        state, chunks = self._choices.get(piece.index), []
        if state is None:
            state = self._choices[piece.index] = _Choice(self.turn.reader())
            chunks.append(ChatChunkChoice(piece.index, ChatDelta("assistant", "")))
        if self.job.params.drop_output:
            piece = Piece(piece.index, "", [], finish_reason="length")
        parts = state.reader.push(piece.text)
        if piece.finish_reason is not None:
            parts = [*parts, *state.reader.finish()]
        fresh = [ChatChunkChoice(piece.index, delta) for delta in _deltas(state, merged(parts))]
        last = fresh[-1] if fresh else ChatChunkChoice(piece.index, ChatDelta())
        if self.request.logprobs and piece.logprobs:
            last.logprobs = ChatLogprobs(self._logprobs(piece.logprobs))
        if self.request.return_token_ids:
            last.token_ids = piece.token_ids
        if piece.finish_reason is not None:
            calls = state.num_calls and piece.finish_reason == "stop"
            last.finish_reason = "tool_calls" if calls else piece.finish_reason
            last.stop_reason = piece.stop_reason
        if not fresh and (last.logprobs or last.finish_reason or self.request.return_token_ids):
            fresh = [last]
        return [*chunks, *fresh]

    def _logprobs(self, scored: Scores) -> list[ChatTokenLogprob]:
        return token_logprobs(self.context.texts, scored, self.request.top_logprobs or 0)


def token_logprobs(texts: TokenTexts, scored: Scores, num_top: int) -> list[ChatTokenLogprob]:
    """Each token with its logprob and those of the most likely tokens."""

    def rival(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(texts.text(token_id), max(logprob, LOWEST), list(texts.raw(token_id)))

    return [
        ChatTokenLogprob(
            texts.text(item.token_id),
            max(item.logprob, LOWEST),
            list(texts.raw(item.token_id)),
            [rival(*top) for top in item.top[:num_top]],
        )
        for item in scored
    ]


def _deltas(state: _Choice, parts: Sequence[Part]) -> list[ChatDelta]:
    """The parts as deltas, in their order."""
    deltas: list[ChatDelta] = []
    for part in parts:
        if isinstance(part, Call):
            first = ToolDelta(state.num_calls, FunctionDelta("", part.name), new_call_id(), "function")
            deltas.append(ChatDelta(tool_calls=[first]))
            state.num_calls += 1
        elif isinstance(part, Arguments):
            last = deltas[-1].tool_calls if deltas else msgspec.UNSET
            if isinstance(last, list):  # the name and the first arguments in one delta
                last[0].function.arguments = part.text
            else:
                deltas.append(ChatDelta(tool_calls=[ToolDelta(state.num_calls - 1, FunctionDelta(part.text))]))
        elif isinstance(part, Reasoning):
            deltas.append(ChatDelta(reasoning_content=part.text))
        else:
            deltas.append(ChatDelta(content=part.text))
    return deltas


def called_tools(parts: Sequence[Part]) -> list[CalledTool]:
    """The calls of a whole answer."""
    calls: list[CalledTool] = []
    for part in parts:
        if isinstance(part, Call):
            calls.append(CalledTool(new_call_id(), CalledFunction(part.name, "")))
        elif isinstance(part, Arguments):
            calls[-1].function.arguments += part.text
    return calls


async def prepare(context: ServerContext, request: ChatRequest, tenant: Tenant) -> ChatCall:
    """Check a request and turn it into a job."""
    return ChatCall(await prepare_turn(context, request, tenant))
