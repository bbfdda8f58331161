"""The life of one generating HTTP request, whichever endpoint it came to."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bifolio.serve.auth import Receive, Tenant
from bifolio.serve.context import ServerContext
from bifolio.serve.errors import ApiError
from bifolio.serve.messages import Piece, Start, Update
from bifolio.serve.responses import PromptTokensDetails, Usage
from bifolio.serve.sampling import EngineParams
from bifolio.serve.stream import RequestStream

logger = logging.getLogger(__name__)
Scored = tuple[int, float, int, list[tuple[int, float]]]  # token id, logprob, rank, rivals


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


@dataclass(slots=True)
class Run:
    """A job in flight: its updates in order, and its metrics."""

    context: ServerContext
    job: Job
    arrival: float = field(default_factory=time.perf_counter)
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    _stream: RequestStream | None = None
    _timer: asyncio.TimerHandle | None = None
    _numbers: dict[str, int] = field(default_factory=dict)  # engine request → which prompt
    _lengths: dict[int, int] = field(default_factory=dict)  # choice → its tokens so far
    _last_token: dict[int, float] = field(default_factory=dict)  # choice → when its last token came

    # -- life --------------------------------------------------------------------------------------------------------
    def start(self) -> None:
        job, engine = self.job, self.context.engine
        salt = job.tenant.salt + (job.cache_salt or "").encode()
        key = (
            job.tenant.name if job.tenant.salt else f"{job.tenant.name}-{id(self):x}"
        )  # without keys, requests take turns
        starts = []
        for number, prompt in enumerate(job.prompts):
            request_id = engine.new_id()
            self._numbers[request_id] = number
            self.context.owners[request_id] = job.tenant.name
            starts.append(
                Start(
                    request_id,
                    prompt,
                    job.params.values,
                    job.params.grammar,
                    job.params.is_beam_search,
                    not job.stream,
                    job.priority,
                    salt,
                    job.wants_steps,
                    key,
                )
            )
            self.context.metrics.prompt_tokens.inc(len(prompt))
            self.context.metrics.prompt_length.observe(len(prompt))
        self._stream = engine.submit(starts)
        self._timer = asyncio.get_running_loop().call_later(self.time_limit, self._too_late)

    async def next(self) -> list[tuple[int, Update]]:
        """(prompt number, its update) of everything new; an empty list after the end."""
        stream = self._stream
        if stream is None:
            return []
        updates = await stream.next()
        return [self._note(update) for update in updates]

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._stream is not None:
            self._stream.close()
        for request_id in self._numbers:
            self.context.owners.pop(request_id, None)

    @property
    def time_limit(self) -> float:
        """Seconds: the server's, or a shorter one of the client's own."""
        return min(self.context.limits.request_timeout, self.job.timeout or math.inf)

    def _too_late(self) -> None:
        own = self.time_limit < self.context.limits.request_timeout
        error = ApiError(408 if own else 504, "the request took longer than its time limit", "timeout")
        if self._stream is not None:
            self._stream.fail(error)

    async def watch(self, receive: Receive) -> None:
        """Wait until the client has gone, then end its requests."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if self._stream is not None:
            self._stream.fail(ApiError(499, "the client has gone", "client_closed"))

    # -- metrics -------------------------------------------------------------------------------------------------------
    def _note(self, update: Update) -> tuple[int, Update]:
        number = self._numbers[update.id]
        metrics, now = self.context.metrics, time.perf_counter()
        if update.ended is not None and update.ended.error is not None:
            status = 500 if update.ended.is_our_fault else 400
            self.close()
            raise ApiError(status, update.ended.error, "generation_failed")
        for piece in update.pieces:
            self._note_piece(number * self.job.num_choices + piece.index, piece, now)
        if update.num_cached_tokens is not None:
            self.num_cached_tokens += update.num_cached_tokens
        if update.ended is not None:
            metrics.request_ended(update.ended, now - self.arrival)
            if not self.job.stream:
                metrics.first_tokens_ended(update.ended, max((len(p.token_ids) for p in update.pieces), default=0))
        return number, update

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
            for _ in range(count):
                metrics.inter_token.observe((now - last) / count)
        if count:
            self._last_token[choice] = now
        self._lengths[choice] = self._lengths.get(choice, 0) + count
        if piece.finish_reason is not None:
            metrics.successes.labels(piece.finish_reason).inc()
            metrics.output_length.observe(self._lengths[choice])

    def usage(self) -> Usage:
        prompt = sum(len(tokens) for tokens in self.job.prompts)
        details = PromptTokensDetails(self.num_cached_tokens)
        return Usage(prompt, self.num_completion_tokens, prompt + self.num_completion_tokens, details)


@dataclass(slots=True)
class Answer:
    """One choice, put together from its pieces."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Scored] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    cumulative_logprob: float | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or []
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason
        self.score = piece.score
        self.cumulative_logprob = piece.cumulative_logprob

    def beam(self) -> dict[str, float | None]:
        return {"score": self.score, "cumulative_logprob": self.cumulative_logprob}


@dataclass(slots=True)
class Whole:
    """All choices of a job, and the prompts' own logprobs."""

    answers: list[Answer]
    prompt_logprobs: list[list[Scored | None] | None]


async def collect(run: Run) -> Whole:
    """Wait for the end."""
    job = run.job
    whole = Whole([Answer() for _ in range(len(job.prompts) * job.num_choices)], [None] * len(job.prompts))
    while updates := await run.next():
        for number, update in updates:
            if update.prompt_logprobs is not None:
                whole.prompt_logprobs[number] = update.prompt_logprobs
            for piece in update.pieces:
                whole.answers[number * job.num_choices + piece.index].add(piece)
    if job.params.drop_output:
        for answer in whole.answers:
            answer.text, answer.token_ids, answer.logprobs = "", [], []
            answer.finish_reason, answer.stop_reason = "length", None
    return whole
