"""The engine's side of the conversation: messages in, a step, messages out.

An update is the difference between a sequence's tokens and those already sent, not the result of one step: tokens of
several fast steps travel together, and a step that failed half-way and was repeated neither loses nor doubles a token.
Updates carry token ids. The front end makes text of them, looks for stop texts and sends `Stop` when it finds one; only
completions that are chosen at the end (best_of, beams) have their text from the engine.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from bifolio.api import messages as m
from bifolio.api.llm import LLM
from bifolio.api.weight_stream import WeightStream
from bifolio.beam_params import BeamSearchParams
from bifolio.engine.adapters import LoadedAdapter
from bifolio.engine.engine import InferenceEngine
from bifolio.engine.thread import EngineThread
from bifolio.errors import BifolioError, FaultKind, GrammarError, RequestError
from bifolio.long_rope import short_context
from bifolio.sampling.thinking import AfterThinking
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import RequestOptions, StepResult
from bifolio.serve.process.adapter_loader import AdapterLoader
from bifolio.serve.process.block_transfer import BlockTransfer
from bifolio.serve.process.conversations import ConversationStore, add_or_fork, images_of
from bifolio.serve.process.fairness import FairThread, Turns
from bifolio.serve.process.grammar_start import GrammarStart
from bifolio.serve.process.kv_events import KvEventPublisher
from bifolio.serve.process.pieces import Live, ended, is_chosen_late, without_text
from bifolio.serve.process.pooled_requests import PooledRequests
from bifolio.serve.process.snapshots import VERBS, Snapshots
from bifolio.serve.process.text_branches import BranchTable
from bifolio.serve.process.update_pace import UpdatePace
from bifolio.serve.process.weight_control import WeightControl
from bifolio.serve.views.snapshot import blocks_of, sessions_of, slots_of, waiting_of
from bifolio.serve.views.steps import add_steps
from bifolio.text.tokenizer import is_library_error

logger = logging.getLogger(__name__)
Send = Callable[[m.FromEngine], None]
COMPILE_SECONDS = 10.0  # that a request waits for its grammar, at most


@dataclass(slots=True)
class EngineService:
    """Serves one engine. `handle` may be called from any thread; `send` is called from the engine's thread."""

    llm: LLM
    send: Send
    max_updates_per_second: float | None = None  # None: by the device
    publisher: KvEventPublisher | None = None  # of the cache's events
    transfer: BlockTransfer | None = None  # of blocks, from or to another engine
    thread: EngineThread = field(init=False)
    _live: dict[str, Live] = field(init=False, default_factory=dict)
    _pooled: PooledRequests = field(init=False)
    _adapters: AdapterLoader = field(init=False)
    _compiler: FairThread = field(init=False)
    _grammars: GrammarStart = field(init=False)
    _compiling: dict[str, float] = field(init=False, default_factory=dict)  # id of a waiting grammar -> its deadline
    _conversations: ConversationStore = field(init=False, default_factory=ConversationStore)
    _weights: WeightStream = field(init=False)
    _branches: BranchTable = field(init=False)
    snapshots: Snapshots = field(init=False)
    _turns: Turns = field(init=False, default_factory=Turns)
    _unstarted: set[str] = field(init=False, default_factory=set)  # ids without a result so far
    _pace: UpdatePace = field(init=False)

    def __post_init__(self) -> None:
        self.thread = EngineThread(self.llm.engine, self._after_step)
        self._branches = BranchTable(self.llm.branches, self.send)
        self._pooled = PooledRequests(self.send)
        self.snapshots = Snapshots(self.llm, self.thread, self._branches, self._conversations, self.send)
        self._adapters = AdapterLoader(self.llm.engine.adapters)
        self._weights = WeightStream(self.llm.engine.runner.kernels.device)
        self._pace = UpdatePace.of(self.llm.engine.runner.kernels, self.max_updates_per_second)
        self._compiler = FairThread("bifolio-grammar")
        self._grammars = GrammarStart(self.llm.model, self._compiler)

    def close(self) -> None:
        """End the engine's thread after the running step, and the compiler's."""
        self.thread.stop()
        self._compiler.close()
        self._adapters.close()
        self._weights.leave()
        self.close_files()
        for part in (self.publisher, self.transfer):
            if part is not None:
                part.close()

    def close_files(self) -> None:
        """Save stored responses and write waiting blocks; the engine's thread has ended."""
        if self.thread.failure is None:
            self.snapshots.save_all(self.llm.engine)
        self.snapshots.close()
        self.llm.engine.close_tiers()

    def hello(self, model_name: str) -> m.Hello:
        engine, published = self.llm.engine, self.publisher
        return m.Hello(
            pid=os.getpid(),
            model_name=model_name,
            kernels=engine.runner.kernels.name,
            max_model_len=engine.config.max_model_len,
            max_num_seqs=engine.config.max_num_seqs,
            vocab_size=engine.model.config.vocab_size,
            num_blocks=engine.blocks.num_blocks,
            block_size=engine.blocks.block_size,
            short_context=short_context(engine.model.config),
            plan=self.llm.plan.lines(),
            adapters=self._adapters.known(),
            loads_adapters=engine.config.adapters.folder is not None,
            kv_cache_dtype=str(engine.config.cache.dtype),
            enable_prefix_caching=engine.config.cache.enable_prefix_caching,
            transfer_port=0 if self.transfer is None else self.transfer.port,
            kv_events=None if published is None else m.KvEventSettings(published.endpoint, published.replay_endpoint),
        )

    # -- messages ----------------------------------------------------------------------------------------------------
    def handle(self, message: m.ToEngine) -> None:
        """Take a message; everything that touches the engine is queued for its thread."""
        if isinstance(message, m.Start):
            is_fetched = self.snapshots.restore_session(message, self.handle) or (
                self.transfer is not None
                and not (message.branch or message.adapters)
                and self.transfer.fetch(message, self._begin)
            )
            if not is_fetched and message.wants_receipt and "identity" not in vars(self.llm):
                threading.Thread(target=self._identify_first, args=(message,), daemon=True).start()
            elif not is_fetched:
                self._begin(message)
        elif isinstance(message, m.Abort):
            self.snapshots.abort(message.ids)
            if self.transfer is not None:
                self.transfer.abort(message.ids)
            self.thread.post(lambda engine: self._abort(engine, message.ids))
        elif isinstance(message, m.Stop):
            self.thread.post(lambda engine: engine.stop(message.id, message.index, message.stop_reason))
        elif isinstance(message, m.Embed):
            asked, begin = message.pooling, partial(self._begin_pooled, message)
            self._with_adapter(message.id, asked.adapters, asked.share, begin)
        elif isinstance(message, m.Look):
            self._post(message.id, lambda engine: self._look(engine, message.id))
        elif isinstance(message, m.Control):
            WeightControl(self.llm, self.thread, self._weights, message, self.send).run()
        elif isinstance(message, m.BranchCall):
            self._with_adapter(message.id, message.adapters, message.share, partial(self._call_branch, message))
        elif isinstance(message, m.Remember | m.Recall):
            self._conversations.handle(message, self.send, self.thread)
        elif isinstance(message, m.Adapt):
            self._adapters.change(message, self.send)
        elif isinstance(message, m.Shutdown):
            self.thread.stop(timeout=0)

    def _call_branch(self, message: m.BranchCall, adapter: LoadedAdapter | None) -> None:
        if message.verb in VERBS:
            self.snapshots.handle(message, adapter)
        else:
            self._post(message.id, lambda engine: self._branches.call(engine, message, adapter))

    def _identify_first(self, message: m.Start) -> None:
        """Digest the model beside the engine, which the first receipt needs: it reads all weights."""
        _ = self.llm.identity
        self._begin(message)

    def _begin(self, message: m.Start) -> None:
        """Queue a request, once its adapter is in memory and its grammar is compiled."""
        self._with_adapter(message.id, message.adapters, message.share, partial(self._begin_with, message))

    def _with_adapter(
        self, request_id: str, named: list[tuple[str, float]], share: str, begin: Callable[[LoadedAdapter | None], None]
    ) -> None:
        """Begin with the sum of named adapters, once it is in memory."""
        if named:
            self._adapters.find(request_id, named, share, begin, self._refuse_early)
        else:
            begin(None)

    def _refuse_early(self, request_id: str, error: BifolioError) -> None:
        self.thread.post(lambda engine: self._refuse(request_id, error))

    def _begin_pooled(self, message: m.Embed, adapter: LoadedAdapter | None) -> None:
        def start(engine: InferenceEngine) -> None:
            try:
                self._pooled.start(engine, message, adapter, self._turns.next(message.pooling.key))
            except BifolioError as error:
                self._refuse(message.id, error)

        self._post(message.id, start)

    def _begin_with(self, message: m.Start, adapter: LoadedAdapter | None) -> None:
        if message.grammar is not None:
            return self._compile_first(message, adapter)
        return self._post(message.id, lambda engine: self._start(engine, message, adapter))

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
                self._forget(request_id)
                self.send(m.Refused(request_id, FaultKind.ENGINE_ERROR, f"the engine failed: {type(error).__name__}"))

        self.thread.post(guarded)

    def beat(self) -> m.Beat:
        """From any thread: the counters are plain numbers, and a torn read does no harm."""
        started = self.thread.step_started
        now = asdict(self.llm.engine.stats())
        now |= now.pop("sharing") | now.pop("states") | now.pop("tiers")
        stats = {name: float(value) for name, value in now.items()}
        stats["num_waiting"] += len(self._compiling) + (0 if self.transfer is None else self.transfer.num_waiting)
        speculator = self.llm.engine.speculator
        if speculator is not None:
            stats["num_draft_tokens"] = float(speculator.stats.num_draft_tokens)
            stats["num_accepted_tokens"] = float(speculator.stats.num_accepted_tokens)
        stats["cpu_seconds"] = time.process_time()
        stats["num_cached_blocks"] = float(self.llm.engine.blocks.num_cached_blocks)
        seconds = 0.0 if started is None else max(time.monotonic() - started, 0.0)
        return m.Beat(stats, seconds, self._adapters.known())

    # -- grammars ------------------------------------------------------------------------------------------------------
    def _compile_first(self, message: m.Start, adapter: LoadedAdapter | None) -> None:
        """Compile on a thread of its own while the steps of other requests go on.

        The front end sends grammars that a helper process has found to be cheap. All wait for one thread, which
        takes them in turn over the shares; `expire_grammars` refuses those that wait longer than `COMPILE_SECONDS`.
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
                self.thread.post(partial(self._refuse_compiled, message.id, reason))
            else:
                self._post(message.id, lambda engine: self._start_compiled(engine, message, adapter, compiled))

        try:
            self._grammars.begin()
            self._compiler.submit(message.share, compile_it)
        except RuntimeError:  # the system starts no further thread
            failure = GrammarError("no thread is free to compile the grammar: ask again later")
            self.thread.post(partial(self._refuse_compiled, message.id, failure))

    def expire_grammars(self) -> None:
        """From any thread, now and then: refuse the requests whose grammar takes too long, and close old branches."""
        if len(self._branches):
            self.thread.post(lambda engine: self._branches.expire())
        self._grammars.look(is_idle=not self.llm.engine.has_work)
        if self._grammars.ready_at is None:
            return
        now, error = time.monotonic(), GrammarError("the grammar takes too long to compile: make it simpler")
        if now < self._grammars.ready_at + COMPILE_SECONDS:
            return  # the first ones waited for the vocabulary
        for request_id in [known for known, deadline in list(self._compiling.items()) if now > deadline]:
            self.thread.post(partial(self._refuse_compiled, request_id, error))

    # -- on the engine's thread ----------------------------------------------------------------------------------------
    def _refuse_compiled(self, request_id: str, error: BifolioError, engine: InferenceEngine) -> None:
        if self._compiling.pop(request_id, None) is not None:
            self._refuse(request_id, error)

    def _start_compiled(
        self, engine: InferenceEngine, message: m.Start, adapter: LoadedAdapter | None, grammar: object
    ) -> None:
        if self._compiling.pop(message.id, None) is not None:  # else it was aborted meanwhile
            self._start(engine, message, adapter, grammar)

    def _start(
        self, engine: InferenceEngine, message: m.Start, adapter: LoadedAdapter | None, grammar: object | None = None
    ) -> None:
        if message.thinking is not None:
            grammar = self._after_thinking(message.thinking, grammar)
        values = {**message.params, **({} if grammar is None else {"grammar": grammar})}
        cost = float(values.get("beam_width") or values.get("best_of") or values.get("n") or 1)
        options: RequestOptions = {"salt": message.salt, "owner": message.share, "adapter": adapter}
        options["session"] = message.session
        options["turn"] = self._turns.next(message.key, cost, message.priority)
        try:
            prompt = message.prompt_token_ids
            options["images"] = images_of(message.images, len(prompt), self.llm.model)
            if message.is_beam_search:
                request = engine.add_request(message.id, prompt, BeamSearchParams(**values), **options)
            elif message.branch:
                request = self._branches.start(engine, message, SamplingParams(**values), options)
            else:
                own = SamplingParams(**values)
                request = add_or_fork(engine, message, own if message.wants_receipt else without_text(own), options)
        except BifolioError as error:
            self._refuse(message.id, error)
            return
        count, chosen_late = len(request.sequences), is_chosen_late(request)
        only_at_the_end = message.final_only or (chosen_late and not message.wants_steps)
        if message.wants_steps:
            request.steps = []
        self._unstarted.add(message.id)
        live = Live(
            request, [request.num_given] * count, [False] * count, chosen_late, only_at_the_end, owner=message.owner
        )
        live.wants_receipt = message.wants_receipt
        self._live[message.id] = live

    def _after_thinking(self, told: m.Thinking, grammar: Any) -> AfterThinking:
        marks = (tuple(told.opening), tuple(told.closing), tuple(told.forced))
        return AfterThinking(self.llm.model.config.vocab_size, *marks, told.budget, grammar)

    def _refuse(self, request_id: str, error: BifolioError) -> None:
        kind = error.fault if isinstance(error, RequestError) else FaultKind.INVALID_REQUEST
        self.send(m.Refused(request_id, kind, str(error)))

    def _abort(self, engine: InferenceEngine, ids: list[str]) -> None:
        self._adapters.abort(ids)
        for request_id in ids:
            self._compiling.pop(request_id, None)
            self._forget(request_id)
            engine.abort(request_id)

    def _forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._pooled.forget(request_id)
        self._unstarted.discard(request_id)

    def _look(self, engine: InferenceEngine, look_id: str) -> None:
        slots, waiting = slots_of(engine), waiting_of(engine)
        for entry in [*slots, *waiting]:
            live = self._live.get(entry["id"])
            entry["owner"] = "" if live is None else live.owner
        self.send(m.Picture(look_id, slots, waiting, self.beat().stats, blocks_of(engine), sessions_of(engine)))

    # -- after a step --------------------------------------------------------------------------------------------------
    def _after_step(self, results: list[StepResult]) -> None:
        """Send the new tokens of all requests after an interval, and at once those of requests that began or ended."""
        urgent: list[Live] = []
        if self._branches.is_waiting:
            for result in results:
                if result.finished:
                    self._branches.ended(result.request_id)
        if self._unstarted:
            for request_id in self._unstarted.intersection([result.request_id for result in results]):
                live = self._live[request_id]
                slot = self.llm.engine.batcher.slot_of(live.request.sequences[0])
                if slot is not None:
                    self.snapshots.slots.taken(slot, live.owner, live.request)
                self._unstarted.discard(request_id)
                self._turns.started(live.request.turn)
                if not live.final_only:
                    urgent.append(live)
        ended = [result.request_id for result in results if result.finished]
        for turn in self._pooled.ended(ended):
            self._turns.started(turn)
        urgent += [self._live[request_id] for request_id in ended if request_id in self._live]
        if self._pace.is_due(time.monotonic(), len(self._live)):
            self._send_news(list(self._live.values()))
        elif urgent:
            self._send_news(urgent)

    def _send_news(self, lives: list[Live]) -> None:
        updates: list[m.Update] = []
        entries = 0
        for live in lives:
            if not live.is_over and (not live.final_only or live.request.is_finished):
                update = self._update(live)
                if update is not None:
                    updates.append(update)
                    entries += update.num_entries
            if entries > m.MAX_FRAME_ENTRIES:
                self.send(m.Updates(updates))
                updates, entries = [], 0
        if updates:
            self.send(m.Updates(updates))

    def _update(self, live: Live) -> m.Update | None:
        request = live.request
        is_finished = request.is_finished
        pieces = live.pieces(is_finished)
        if not pieces and not request.steps and not is_finished:
            return None
        update = m.Update(request.request_id, pieces)
        add_steps(update, request)
        if not live.sent_first and pieces:
            live.sent_first = True
            update.num_cached_tokens = request.metrics.num_cached_tokens
            if request.prompt_scores is not None:
                update.prompt_scores = request.prompt_scores.packed()
        if is_finished:
            is_wanted = live.wants_receipt and request.error is None
            update.ended = ended(request, self.llm.receipt(request) if is_wanted else None)
            live.is_over = True
            self._forget(request.request_id)
        return update
