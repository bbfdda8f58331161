"""The engine's side of the conversation: messages in, a step, messages out.

An update is the difference between a sequence's tokens and those already sent, not the result of one step: tokens of
several fast steps travel together, and a step that failed half-way and was repeated neither loses nor doubles a token.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from bifolio.api.llm import LLM
from bifolio.api.outputs import PositionLogprobs
from bifolio.beam_params import BeamSearchParams
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.fault.out_of_memory import STEP_FAILED
from bifolio.engine.thread import EngineThread
from bifolio.errors import NO_FINITE_LOGIT, BifolioError, GrammarError, RequestError
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import BeamStep, DraftStep, Request, StepResult, TokenLogprob
from bifolio.serve import messages as m
from bifolio.serve.embedding import EmbeddingQueue
from bifolio.serve.fairness import Turns
from bifolio.serve.snapshot import blocks_of, slots_of, waiting_of
from bifolio.text.tokenizer import is_library_error

logger = logging.getLogger(__name__)
Send = Callable[[m.FromEngine], None]
MAX_UPDATE_SECONDS = 0.1  # a stream is never silent for longer because of others
COMPILE_SECONDS = 10.0  # that a request waits for its grammar, at most


@dataclass(slots=True)
class _Live:
    """A running request, and how much of each completion was sent."""

    request: Request
    sent_tokens: list[int]
    sent_chars: list[int]
    ended: list[bool]
    final_only: bool = False
    has_news: bool = False
    sent_first: bool = False


@dataclass(slots=True)
class EngineService:
    """Serves one engine. `handle` may be called from any thread; `send` is called from the engine's thread."""

    llm: LLM
    send: Send
    max_updates_per_second: float = 400.0
    thread: EngineThread = field(init=False)
    _live: dict[str, _Live] = field(init=False, default_factory=dict)
    _embeddings: EmbeddingQueue = field(init=False)
    _compiler: ThreadPoolExecutor = field(init=False)
    _compiling: dict[str, float] = field(init=False, default_factory=dict)  # id of a waiting grammar -> its deadline
    _turns: Turns = field(init=False, default_factory=Turns)
    _watched: set[str] = field(init=False, default_factory=set)  # ids whose steps are sent
    _last_sent: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.thread = EngineThread(self.llm.engine, self._after_step)
        self._embeddings = EmbeddingQueue(self.llm.engine)
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bifolio-grammar")

    def hello(self, model_name: str) -> m.Hello:
        engine = self.llm.engine
        return m.Hello(
            pid=os.getpid(),
            model_name=model_name,
            kernels=engine.runner.kernels.name,
            max_model_len=engine.config.max_model_len,
            max_num_seqs=engine.config.max_num_seqs,
            vocab_size=engine.model.config.vocab_size,
            num_blocks=engine.blocks.num_blocks,
            block_size=engine.blocks.block_size,
            plan=self.llm.plan.lines(),
        )

    # -- messages ----------------------------------------------------------------------------------------------------
    def handle(self, message: m.ToEngine) -> None:
        """Take a message; everything that touches the engine is queued for its thread."""
        if isinstance(message, m.Start) and message.grammar is not None:
            self._compile_first(message)
        elif isinstance(message, m.Start):
            self._post(message.id, lambda engine: self._start(engine, message))
        elif isinstance(message, m.Abort):
            self.thread.post(lambda engine: self._abort(engine, message.ids))
        elif isinstance(message, m.Embed):
            self._post(message.id, lambda engine: self._embed(message))
        elif isinstance(message, m.Look):
            self._post(message.id, lambda engine: self._look(engine, message.id))
        elif isinstance(message, m.Shutdown):
            self.thread.stop(timeout=0)

    def _post(self, request_id: str, command: Callable[[InferenceEngine], None]) -> None:
        """Queue a command whose failure, of any kind, refuses one request and nothing else."""

        def guarded(engine: InferenceEngine) -> None:
            try:
                command(engine)
            except BaseException as error:
                if not is_library_error(error):
                    raise
                logger.exception("a command for a request failed")
                engine.abort(request_id)
                self._live.pop(request_id, None)
                self.send(m.Refused(request_id, "EngineError", f"the engine failed: {type(error).__name__}"))

        self.thread.post(guarded)

    def beat(self) -> m.Beat:
        """From any thread: the counters are plain numbers, and a torn read does no harm."""
        started = self.thread.step_started
        now = asdict(self.llm.engine.stats())
        sharing = now.pop("sharing")
        stats = {name: float(value) for name, value in (now | sharing).items()}
        stats["num_waiting"] += len(self._compiling)
        speculator = self.llm.engine.speculator
        if speculator is not None:
            stats["num_draft_tokens"] = float(speculator.stats.num_draft_tokens)
            stats["num_accepted_tokens"] = float(speculator.stats.num_accepted_tokens)
        stats["num_cached_blocks"] = float(self.llm.engine.blocks.num_cached_blocks)
        return m.Beat(stats, 0.0 if started is None else max(time.monotonic() - started, 0.0))

    # -- grammars ------------------------------------------------------------------------------------------------------
    def _compile_first(self, message: m.Start) -> None:
        """Compile on a thread of its own while the steps of other requests go on.

        The front end sends grammars that a helper process has found to be cheap. All wait for one thread; those that
        wait longer than `COMPILE_SECONDS` are refused by `expire_grammars`.
        """
        self._compiling[message.id] = time.monotonic() + COMPILE_SECONDS

        def compile_it() -> None:
            from bifolio.sampling.grammar import Grammar, compile_grammar

            kind, text = message.grammar or ("", "")
            if message.id not in self._compiling:
                return  # aborted or too late
            try:
                compiled = compile_grammar(Grammar(kind, text), self.llm.model)  # type: ignore[arg-type]
            except BifolioError as error:
                reason = error
                self.thread.post(lambda engine: self._refuse_compiled(message.id, reason))
            else:
                self._post(message.id, lambda engine: self._start_compiled(engine, message, compiled))

        try:
            self._compiler.submit(compile_it)
        except RuntimeError:  # the system starts no further thread
            failure = GrammarError("no thread is free to compile the grammar: ask again later")
            self.thread.post(lambda engine: self._refuse_compiled(message.id, failure))

    def expire_grammars(self) -> None:
        """From any thread, now and then: refuse the requests whose grammar takes too long."""
        now, error = time.monotonic(), GrammarError("the grammar takes too long to compile: make it simpler")
        for request_id in [known for known, deadline in list(self._compiling.items()) if now > deadline]:
            self.thread.post(partial(self._refuse_late, request_id, error))

    # -- on the engine's thread ----------------------------------------------------------------------------------------
    def _refuse_late(self, request_id: str, error: BifolioError, engine: InferenceEngine) -> None:
        self._refuse_compiled(request_id, error)

    def _refuse_compiled(self, request_id: str, error: BifolioError) -> None:
        if self._compiling.pop(request_id, None) is not None:
            self._refuse(request_id, error)

    def _start_compiled(self, engine: InferenceEngine, message: m.Start, grammar: object) -> None:
        if self._compiling.pop(message.id, None) is not None:  # else it was aborted meanwhile
            self._start(engine, message, grammar)

    def _start(self, engine: InferenceEngine, message: m.Start, grammar: object | None = None) -> None:
        values = dict(message.params) if grammar is None else {**message.params, "grammar": grammar}
        cost = float(values.get("beam_width") or values.get("best_of") or values.get("n") or 1)
        turn = self._turns.next(message.key, cost, message.priority)
        owner = message.key if message.salt else ""  # without keys, all requests are of one client
        options: dict[str, Any] = {"turn": turn, "salt": message.salt, "owner": owner}
        prompt = message.prompt_token_ids
        try:
            if message.is_beam_search:
                request = engine.add_beam_search(message.id, prompt, BeamSearchParams(**values), **options)
            else:
                request = engine.add_request(message.id, prompt, SamplingParams(**values), **options)
        except BifolioError as error:
            self._refuse(message.id, error)
            return
        count = len(request.sequences)
        only_at_the_end = message.final_only or (_decided_at_the_end(request) and not message.wants_steps)
        if message.wants_steps:
            request.steps = []
            self._watched = {name for name in self._watched if name in self._live} | {message.id}
        self._live[message.id] = _Live(request, [0] * count, [0] * count, [False] * count, only_at_the_end)

    def _refuse(self, request_id: str, error: BifolioError) -> None:
        kind = type(error).__name__ if isinstance(error, RequestError) else "RequestError"
        self.send(m.Refused(request_id, kind, str(error)))

    def _abort(self, engine: InferenceEngine, ids: list[str]) -> None:
        for request_id in ids:
            self._compiling.pop(request_id, None)
            self._embeddings.abort(request_id)
            self._live.pop(request_id, None)
            engine.abort(request_id)

    def _embed(self, message: m.Embed) -> None:
        def done(vector: np.ndarray | None, error: Exception | None) -> None:
            if vector is not None:
                self.send(m.Embedding(message.id, vector.astype("<f4").tobytes()))
            else:
                logger.error("an embedding failed", exc_info=error)
                self.send(m.Refused(message.id, "EngineError", f"the computation failed: {type(error).__name__}"))

        try:
            self._embeddings.add(message.id, message.token_ids, done)
        except RequestError as error:
            self._refuse(message.id, error)
        self.thread.background = self._embeddings.advance

    def _look(self, engine: InferenceEngine, look_id: str) -> None:
        self.send(m.Picture(look_id, slots_of(engine), waiting_of(engine), self.beat().stats, blocks_of(engine)))

    # -- after a step --------------------------------------------------------------------------------------------------
    def _after_step(self, results: list[StepResult]) -> None:
        """Mark the requests with new tokens; send at once if one of them began or ended, else after an interval."""
        urgent = False
        for result in results:
            live = self._live.get(result.request_id)
            if live is not None:
                live.has_news = not live.final_only or live.request.is_finished
                self._turns.started(live.request.turn)
                urgent = urgent or (live.has_news and (result.finished or not live.sent_first))
        for live in [self._live[name] for name in self._watched if name in self._live]:
            live.has_news = live.has_news or bool(live.request.steps)
        now = time.monotonic()
        interval = min(len(self._live) / self.max_updates_per_second, MAX_UPDATE_SECONDS)
        if urgent or now - self._last_sent >= interval:
            self._last_sent = now
            self._send_news()

    def _send_news(self) -> None:
        updates: list[m.Update] = []
        entries = 0
        for live in list(self._live.values()):
            if live.has_news:
                live.has_news = False
                update = self._update(live)
                if update is not None:
                    updates.append(update)
                    entries += update.num_entries
            if entries > m.MAX_FRAME_ENTRIES:
                self.send(m.Updates(updates))
                updates, entries = [], 0
        if updates:
            self.send(m.Updates(updates))

    def _update(self, live: _Live) -> m.Update | None:
        request = live.request
        pieces = self._pieces(live)
        update = m.Update(request.request_id, pieces)
        has_steps = _add_steps(update, request)
        if not live.sent_first and pieces:
            live.sent_first = True
            update.num_cached_tokens = request.metrics.num_cached_tokens
            if request.prompt_logprobs is not None:
                update.prompt_logprobs = [None if item is None else _logprob(item) for item in request.prompt_logprobs]
        if request.is_finished:
            update.ended = _ended(request)
            del self._live[request.request_id]
        return update if pieces or has_steps or update.ended is not None else None

    def _pieces(self, live: _Live) -> list[m.Piece]:
        request = live.request
        if _decided_at_the_end(request):
            return _final_pieces(request) if request.is_finished else []
        pieces = []
        for number, sequence in enumerate(request.sequences):
            tokens, chars = live.sent_tokens[number], live.sent_chars[number]
            reason = sequence.finish_reason
            if live.ended[number] or (len(sequence.output_token_ids) == tokens and reason is None):
                continue
            pieces.append(
                m.Piece(
                    sequence.index,
                    sequence.text[chars:],
                    sequence.output_token_ids[tokens:],
                    [_logprob(item) for item in sequence.logprobs[tokens:]] if request.params.needs_logprobs else None,
                    None if reason is None else reason.value,
                    sequence.stop_reason,
                    sequence.cumulative_logprob if reason is not None else None,
                )
            )
            live.sent_tokens[number] = len(sequence.output_token_ids)
            live.sent_chars[number] = len(sequence.text)
            live.ended[number] = reason is not None
        return pieces


def _decided_at_the_end(request: Request) -> bool:
    """Which completions are returned, and in which order, is decided at the end."""
    return request.params.num_sequences > request.params.n or request.search is not None


def _add_steps(update: m.Update, request: Request) -> bool:
    """Move the recorded steps of a watched request into the update; False if there are none."""
    if not request.steps:
        return False
    drafts = [step for step in request.steps if isinstance(step, DraftStep)]
    beams = [step for step in request.steps if isinstance(step, BeamStep)]
    request.steps.clear()
    update.drafts = [(step.completion, step.position, list(step.drafts), step.num_accepted) for step in drafts] or None
    update.beams = [(step.position, list(step.beams)) for step in beams] or None
    return True


def _final_pieces(request: Request) -> list[m.Piece]:
    from bifolio.api.outputs import request_output

    return [
        m.Piece(
            output.index,
            output.text,
            output.token_ids,
            None if output.logprobs is None else [_logprob(item) for item in output.logprobs],
            output.finish_reason,
            output.stop_reason,
            output.cumulative_logprob,
            output.score,
        )
        for output in request_output(request).outputs
    ]


def _logprob(item: TokenLogprob | PositionLogprobs) -> tuple[int, float, int, list[tuple[int, float]]]:
    return (item.token_id, item.logprob, item.rank, list(item.top))


def _ended(request: Request) -> m.Ended:
    metrics = request.metrics
    return m.Ended(
        metrics.queue_time,
        metrics.prefill_time,
        metrics.decode_time,
        metrics.num_cached_tokens,
        metrics.num_preemptions,
        request.error,
        (request.error or "").startswith((STEP_FAILED, NO_FINITE_LOGIT)),
    )
