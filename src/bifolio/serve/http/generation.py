"""The life of one generating HTTP request, whichever endpoint it came to."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bifolio.api.messages import BranchUse, Ended, Image, NewTokens, Start, Thinking, Update
from bifolio.api.update_stream import UpdateStream
from bifolio.errors import EngineFaultError, FaultKind
from bifolio.images import PromptImage
from bifolio.logprob_records import LogprobRecords, TokenLogprob
from bifolio.sampling_params import SamplingParams
from bifolio.serve.http.auth import Receive, Tenant
from bifolio.serve.http.context import ServerContext
from bifolio.serve.http.errors import ApiError, api_error, bad_request
from bifolio.serve.http.sampling import EngineParams
from bifolio.serve.http.session_fields import session_of
from bifolio.serve.protocols.openai_answers import CompletionTokensDetails, PromptTokensDetails, Usage
from bifolio.serve.protocols.openai_types import Generation, StreamOptions
from bifolio.sessions import SessionHint
from bifolio.text.stopping import OutputText, TokenEnd

logger = logging.getLogger(__name__)
Scores = list[TokenLogprob]
NO_SCORES: Scores = []
TEXT_OPTIONS = ("stop", "include_stop_str_in_output", "min_tokens", "max_tokens", "skip_special_tokens")


@dataclass(slots=True)
class Job:
    """The prompts and parameters of a client's request, in the engine's terms."""

    tenant: Tenant
    prompts: Sequence[list[int]]
    params: EngineParams
    num_choices: int  # of each prompt
    stream: bool
    priority: int = 0
    cache_salt: str | None = None
    timeout: float | None = None
    num_drawn: int = 1  # sequences of each prompt: best_of, or beams
    wants_steps: bool = False  # verified drafts and steps of a beam search
    write_interval: float = 0.0  # seconds whose events are written together; 0: each event alone
    kept_tokens: frozenset[int] = frozenset()  # special tokens that stay in the text: marks of calls and reasoning
    thinking: Thinking | None = None
    keeps: bool = False  # the blocks stay in the engine, for follow-ups
    parent: str = ""  # engine request that this one may continue
    request_id: str = ""  # of the engine's first request, once it was started
    transfer_params: dict[str, Any] | None = None  # `kv_transfer_params` of the request
    prefill_at: str = ""  # the prefill engine that a gateway chose
    branch: str = ""  # that the request continues or scores; the engine has its tokens
    branch_use: BranchUse = "beside"
    wants_receipt: bool = False
    images: tuple[PromptImage, ...] = ()  # of its only prompt
    model: str = ""  # as the answer names it
    adapters: list[tuple[str, float]] = field(default_factory=list)  # names and factors
    session: SessionHint | None = None

    @classmethod
    def of(
        cls,
        context: ServerContext,
        request: Generation,
        tenant: Tenant,
        prompts: Sequence[list[int]],
        params: EngineParams,
        num_drawn: int,
    ) -> Job:
        """The job of a request whose prompts and parameters were checked."""
        stream_options = request.stream_options or StreamOptions()
        return cls(
            tenant,
            prompts,
            params,
            request.n,
            request.stream,
            request.priority,
            request.cache_salt,
            request.timeout,
            num_drawn,
            stream_options.include_steps,
            stream_options.interval_ms / 1000,
            transfer_params=request.kv_transfer_params,
            model=request.model or context.name,
            adapters=context.adapters_for(request.model),
            wants_receipt=wanted_receipt(request, len(prompts)),
            session=session_of(request, len(prompts)),
        )


def wanted_receipt(request: Generation, num_prompts: int) -> bool:
    """Whether the answer carries a receipt, which is that of one whole answer."""
    if request.receipt and (request.stream or num_prompts > 1):
        name = "stream" if request.stream else "prompt"
        raise bad_request("a receipt comes with the whole answer to one prompt: leave out `stream`, or send one", name)
    return request.receipt


@dataclass(slots=True)
class Piece:
    """New text and tokens of one choice."""

    index: int  # among the choices of its prompt
    text: str
    token_ids: list[int]
    logprobs: Scores = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None
    score: float | None = None  # of a beam


@dataclass(slots=True)
class News:
    """New output of one prompt."""

    number: int  # of the prompt
    update: Update  # as the engine sent it
    pieces: list[Piece]
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(slots=True)
class Run:
    """A job in flight: its updates in order, as text, and its metrics."""

    context: ServerContext
    job: Job
    arrival: float = field(default_factory=time.perf_counter)
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_forced_tokens: int = 0
    receipts: list[dict[str, Any]] = field(default_factory=list)  # one for each prompt that ended
    ended: Ended | None = None  # times of the last engine request that ended
    _stream: UpdateStream | None = None
    _timer: asyncio.TimerHandle | None = None
    _place: int | None = None  # among the concurrent requests without a key
    _numbers: dict[str, int] = field(default_factory=dict)  # engine request → which prompt
    _lengths: dict[int, int] = field(default_factory=dict)  # choice → its tokens so far
    _last_token: dict[int, float] = field(default_factory=dict)  # choice → when its last token came
    _texts: dict[int, OutputText] = field(default_factory=dict)  # choice → its text so far
    _stopped: set[int] = field(default_factory=set)  # choices that ended at a stop text

    # -- life --------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        job, engine = self.job, self.context.engine
        adapters = [] if job.branch else job.adapters  # a branch has those that it was opened with
        salt = job.tenant.salt + (job.cache_salt or "").encode()
        key = job.tenant.name
        if not job.tenant.has_key:  # without keys, concurrent requests take turns as if each came from another client
            self._place = self.context.take_place()
            key = f"{key}-{os.getpid():x}-{self._place}"
        starts = []
        for number, prompt in enumerate(job.prompts):
            request_id = engine.new_id()
            self._numbers[request_id] = number
            starts.append(
                Start(
                    request_id,
                    [] if job.branch and job.branch_use != "score" else prompt,
                    job.params.values,
                    job.params.grammar,
                    job.params.is_beam_search,
                    not (job.stream or self._looks_for_stops),
                    job.priority if job.tenant.has_key or self.context.allow_priority else 0,
                    salt,
                    job.wants_steps,
                    key,
                    job.tenant.name,
                    job.tenant.share,
                    job.thinking,
                    job.keeps,
                    job.parent,
                    job.prefill_at,
                    job.branch,
                    job.branch_use,
                    job.wants_receipt or self.context.receipts is not None,
                    [Image.of(image) for image in job.images],
                    adapters,
                    job.session,
                )
            )
            self.context.metrics.prompt_tokens.inc(len(prompt))
            self.context.metrics.prompt_length.observe(len(prompt))
        job.request_id = starts[0].id
        self._stream = engine.submit(starts)
        self._timer = asyncio.get_running_loop().call_later(self.time_limit, self._too_late)

    async def next(self) -> list[News]:
        """Everything new; an empty list after the end."""
        stream = self._stream
        if stream is None:
            return []
        try:
            updates = await stream.next()
        except EngineFaultError as fault:
            raise api_error(fault) from fault
        return [self._note(update) for update in updates]

    @property
    def _looks_for_stops(self) -> bool:
        """Whether a stop text may end a choice before the engine does."""
        job, params = self.job, self.job.params
        return bool(params.values.get("stop")) and not params.is_beam_search and job.num_drawn <= job.num_choices

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            self._stream.close()
        if self._place is not None:
            self.context.give_back_place(self._place)
            self._place = None

    @property
    def time_limit(self) -> float:
        """Seconds: the server's, or a shorter one of the client's own."""
        return min(self.context.limits.request_timeout, self.job.timeout or math.inf)

    def _too_late(self) -> None:
        own = self.time_limit < self.context.limits.request_timeout
        error = ApiError(
            408 if own else 504,
            f"the request took longer than {self.time_limit:g} s, its time limit: shorten it",
            "timeout",
        )
        if self._stream is not None:
            self._stream.fail(error)

    async def watch(self, receive: Receive) -> None:
        """Wait until the client has gone, then end its requests."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if self._stream is not None:
            self._stream.fail(ApiError(499, "the client has gone", "client_closed"))

    # -- text ----------------------------------------------------------------------------------------------------------
    def _note(self, update: Update) -> News:
        number = self._numbers[update.id]
        metrics, now = self.context.metrics, time.perf_counter()
        if update.ended is not None and update.ended.error is not None:
            fault = update.ended.fault or FaultKind.ENGINE_ERROR
            self.close()
            raise ApiError(500 if fault.is_of_engine else 400, update.ended.error, "generation_failed")
        pieces = []
        for new in update.pieces:
            choice = number * self.job.num_choices + new.index
            if choice not in self._stopped:
                pieces.append(self._piece(update.id, choice, new))
                self._note_piece(choice, pieces[-1], now)
        news = News(number, update, pieces)
        if update.prompt_scores is not None:
            wanted = self.job.params.values.get("prompt_logprobs") or 0
            news.prompt_logprobs = [None, *LogprobRecords(wanted, update.prompt_scores)]
        if update.num_cached_tokens is not None:
            self.num_cached_tokens += update.num_cached_tokens
        if update.ended is not None:
            self.ended = update.ended
            if update.ended.receipt is not None:
                self.receipts.append(update.ended.receipt)
            self.num_forced_tokens += update.ended.num_forced_tokens
            metrics.request_ended(update.ended, now - self.arrival)
            if not self.job.stream:
                metrics.first_tokens_ended(update.ended, max(self._lengths.values(), default=0))
        return news

    def _piece(self, request_id: str, choice: int, new: NewTokens) -> Piece:
        """The text of new tokens; a stop text in it ends the choice, and the engine is told."""
        token_ids = array("i", new.token_ids).tolist()
        piece = Piece(new.index, new.text or "", token_ids, NO_SCORES, new.finish_reason, new.stop_reason)
        if new.text is None:
            end = None
            if new.finish_reason == "stop" and not isinstance(new.stop_reason, str):
                end = TokenEnd("stop", new.stop_reason if isinstance(new.stop_reason, int) else None)
            elif new.finish_reason == "length":
                end = TokenEnd("length")
            count, decision = self._text(choice).push_all(token_ids, end)
            piece.text = decision.text
            if new.finish_reason is not None and decision.finish_reason is None:  # the engine found a stop text
                piece.text += self._text(choice).flush()
            if isinstance(decision.stop_reason, str):
                piece.finish_reason, piece.stop_reason = "stop", decision.stop_reason
                del token_ids[count:]
                self._stopped.add(choice)
                if new.finish_reason is None:
                    self.context.engine.stop(request_id, new.index, decision.stop_reason)
        else:
            piece.cumulative_logprob, piece.score = new.cumulative_logprob, new.score
        if new.scores is not None:
            wanted = self.job.params.values.get("logprobs") or 0
            piece.logprobs = LogprobRecords(wanted, new.scores)[: len(token_ids)]
        return piece

    def _text(self, choice: int) -> OutputText:
        found = self._texts.get(choice)
        if found is None:
            job, tokenizer = self.job, self.context.model.tokenizer
            values = job.params.values
            params = SamplingParams(**{name: values[name] for name in TEXT_OPTIONS if name in values})
            detokenizer = None
            if tokenizer is not None:
                prompt = job.prompts[choice // job.num_choices]
                detokenizer = tokenizer.new_detokenizer(prompt, params.skip_special_tokens, job.kept_tokens)
            found = self._texts[choice] = OutputText(params, detokenizer)
        return found

    # -- metrics -------------------------------------------------------------------------------------------------------
    def _note_piece(self, choice: int, piece: Piece, now: float) -> None:
        metrics, count = self.context.metrics, len(piece.token_ids)
        if self.job.params.drop_output:
            count = 0
        self.num_completion_tokens += count
        metrics.generation_tokens.inc(count)
        last = self._last_token.get(choice)
        if not self.job.stream:
            pass  # everything comes at once, and the engine's own times are used
        elif last is None and count:
            metrics.time_to_first_token.observe(now - self.arrival)
        elif last is not None and count:
            metrics.inter_token.observe((now - last) / count, count)
        if count:
            self._last_token[choice] = now
        self._lengths[choice] = self._lengths.get(choice, 0) + count
        if piece.finish_reason is not None:
            metrics.successes.labels(piece.finish_reason).inc()
            metrics.output_length.observe(self._lengths[choice])

    def usage(self) -> Usage:
        prompt = sum(len(tokens) for tokens in self.job.prompts)
        details = PromptTokensDetails(self.num_cached_tokens)
        total, forced = prompt + self.num_completion_tokens, CompletionTokensDetails(self.num_forced_tokens)
        return Usage(prompt, self.num_completion_tokens, total, details, forced)
