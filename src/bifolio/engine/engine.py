"""The engine: a step plans, launches and collects; requests are added and finished between steps.

    plan     the batcher admits and evicts, the planner selects tokens and reserves their blocks    (host only)
    launch   moves, the forward pass and sampling are queued on the device                         -> a ticket
    collect  the tokens of a launched step are read: append, stop, fork, verify, finish

On a CPU a ticket is complete when `launch` returns and is collected at once. On a GPU the host plans and launches step
t + 1 while step t runs. Grammar masks need the tokens of step t: a step with such masks is launched up to its logits,
and drawn when step t is collected, unless all such sequences are greedy (`engine.unmasked_draws`). Sequences that
the host draws from token values skip a step. One thread owns an engine; other threads send commands through a queue
(`engine.thread`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Sequences
from dataclasses import replace
from typing import Unpack

from bifolio.beam_params import BeamSearchParams
from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.sharing import BlockShareManager, SpeculativeDecodingSharing
from bifolio.config import EngineConfig
from bifolio.engine.adapters import AdapterStore
from bifolio.engine.executor import DecodeExecutor, Launched, ModelRunner, Peers, PrefillExecutor
from bifolio.engine.fault.progress import ProgressWatch
from bifolio.engine.fault.recovery import FaultRecovery
from bifolio.engine.host_batch import Readout
from bifolio.engine.kept import KeptConversations
from bifolio.engine.pooling import PooledPass
from bifolio.engine.postprocess import Postprocessor, Ticket
from bifolio.engine.requests import RequestFactory
from bifolio.engine.slot_state import SlotState
from bifolio.engine.speculative.build import new_speculator, with_taps
from bifolio.engine.speculative.speculator import Speculator
from bifolio.engine.state_plan import with_states
from bifolio.engine.stats import EngineStats
from bifolio.engine.tiers.build import new_tiers
from bifolio.engine.tiers.tiers import CacheTiers
from bifolio.kernels.interface import KernelSet, SlotSizes
from bifolio.kernels.storage import BlockMover, poison_in
from bifolio.model.digests import EngineDigests
from bifolio.model.draft_head import LoadedHead
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import OnLoad
from bifolio.pooling_params import PoolingParams
from bifolio.sampling.sampler import Sampler, SamplingTable
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.batcher import ContinuousBatcher
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.phases import PhaseManager
from bifolio.schedule.plan import BatchSlot, StepPlan
from bifolio.sequence import FinishReason, Request, RequestOptions, RequestPhase, Sequence, StepResult


class InferenceEngine(KeptConversations):
    """Continuous batching over one paged cache."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        kernels: KernelSet,
        draft_model: LoadedModel | LoadedHead | None = None,
        on_load: OnLoad = lambda done, total: None,  # (layers prepared, layers in all)
        peers: Peers | None = None,  # the other ranks of tensor parallelism
    ) -> None:
        cache = with_states(model.config, config)
        if model.config.bidirectional:  # keys depend on the tokens after them
            cache = replace(cache, enable_prefix_caching=False)
        self.model = model
        self.config = config = replace(config, cache=cache)
        self.blocks = KVCacheBlockManager(
            cache.num_blocks,
            cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            num_states=cache.num_states,
            checkpoint_tokens=cache.checkpoint_tokens or 0,
        )
        self.shares = BlockShareManager(self.blocks)
        self.runner = ModelRunner.new(with_taps(model, draft_model), cache, kernels, on_load, peers)
        self.storages: list[BlockMover] = [self.runner.storage, *([] if peers is None else [peers])]  # then of drafts
        if cache.poison_free_blocks:
            self.blocks.on_free = poison_in(self.storages)
            self.blocks.on_take_state(self.runner.storage.poison_state)
        self.prefill_executor = PrefillExecutor(self.runner, config.chunk_size)
        self.decode_executor = DecodeExecutor(self.runner)
        self.slots = self._new_slots()
        self.speculator = new_speculator(self, draft_model)
        speculation = None if self.speculator is None else SpeculativeDecodingSharing(self.shares)
        self.batcher = ContinuousBatcher(
            config.max_num_seqs, self.blocks, listener=self, max_waiting=config.max_waiting
        )
        self.phases = PhaseManager(
            PrefillOrchestrator(self.blocks),
            DecodeOrchestrator(self.blocks),
            chunk_size=config.chunk_size,
            preempt=self.batcher.preempt,
            drop_kept=self.batcher.drop_kept,
            speculation=speculation,
            computes_whole=model.config.bidirectional,
        )
        self.postprocess = Postprocessor(
            self.batcher, self.phases, self.blocks, self.slots, self.runner, self.speculator, speculation
        )
        self.adapters = AdapterStore.of(model, config.adapters, self.runner, self.slots.device)
        self.faults = FaultRecovery(self)
        self.progress = ProgressWatch(self)
        self.requests: dict[str, Request] = {}  # not finished yet
        self.weight_version = 0  # counts the exchanges of weights
        self.asleep: set[str] = set()  # the parts whose memory was given back (`engine.sleep`); no step runs
        self.factory = RequestFactory(model, config, self.blocks, self.requests, self.runner.images is not None)
        self.in_flight: deque[Ticket] = deque()
        self._depth = config.launch_ahead if config.launch_ahead is not None else int(kernels.launches_ahead)
        self._counters = EngineStats()
        self._outbox: list[StepResult] = []  # results that are not delivered yet
        self._has_launched = False  # the last step had work, or some is in flight
        self.digests = EngineDigests(kernels, config)
        self.tiers: CacheTiers | None = None  # attaches itself
        new_tiers(self, config.tiers, draft_model)

    # -- one step -----------------------------------------------------------------------------------------------
    def step(self) -> list[StepResult]:
        """Run one step. A step that raises ends one request at most (`engine.fault`)."""
        faults = self.faults
        if faults.is_active:
            faults.before_step()
        try:
            if self.tiers is not None and self.tiers.has_tickets:
                self.tiers.land(self, is_idle=not self._has_launched)
            overdue = self.batcher.overdue()
            if overdue is not None:
                self._yield_to(overdue)
            self.batcher.step(self._iterate)
        except Exception as error:
            failure = error.with_traceback(None)  # the frames hold the arrays of the failed step
        else:
            if faults.is_active:
                faults.step_succeeded()
            return self._deliver()
        self._outbox.extend(self.faults.recover(failure))
        return self._deliver()

    def _iterate(self, slots: list[BatchSlot]) -> list[StepResult]:
        """Plan and launch the next step; collect the steps that are due."""
        plan = self.plan(slots)
        if self.in_flight and (plan.is_short or not (plan.decodes or plan.prefills)):
            self.collect()  # the tokens in flight are needed first
            if not (plan.decodes or plan.prefills):
                plan = self.plan(slots)
        self._has_launched = bool(plan.decodes or plan.prefills or self.in_flight)
        if plan.decodes or plan.prefills:
            self.in_flight.append(self.launch(plan))
        elif not self.has_work:
            self.blocks.check_invariants()  # idle: check that no block leaked
        if self.in_flight and self.in_flight[-1].launched.undrawn is not None:
            self.draw()
        while len(self.in_flight) > self._depth:
            self.collect()
        return self._outbox

    def _yield_to(self, sequence: Sequence) -> None:
        """Let a sequence that waits take slots of an owner that has many (`schedule.shares`)."""
        while self.in_flight:
            self.collect()
        self.batcher.evict_completed()
        if sequence.finish_reason is None:
            self._counters.num_preemptions += len(self.batcher.yield_to(sequence))

    def plan(self, slots: list[BatchSlot]) -> StepPlan:
        """Select the tokens of the next step and reserve their blocks."""
        budget = self.faults.token_budget if self.faults.is_active else self.config.token_budget
        for changed in self.slots.unmasked.take_changed():
            self.batcher.slots[changed].waits_for_tokens = self._waits_for_tokens(changed)
        drafts = None if self.speculator is None else self._room_for_drafts(slots, self.speculator)
        return self.phases.plan(slots, budget, drafts, may_preempt=not self.in_flight)

    def launch(self, plan: StepPlan) -> Ticket:
        """Queue moves, the forward pass and sampling."""
        started = time.perf_counter()
        self.blocks.run_moves(self.storages)  # copy-on-write, before any write
        self.slots.update(plan)
        speculator = self.speculator
        if speculator is not None:
            plan = speculator.fill(plan, self.slots)  # a draft model runs here
        if self.blocks.has_states:
            plan = replace(plan, states=tuple(self.blocks.use_states(plan.state_requests())))
        drawn, pooled = plan.split()
        readout, launched = Readout.from_plan(drawn), Launched(None, None)
        if not drawn.is_empty:
            executor = self.prefill_executor if drawn.prefills else self.decode_executor
            with_states = speculator is not None and speculator.reads_states(drawn)
            launched = executor.launch(drawn, readout, self.slots, with_states)
            if speculator is not None:
                speculator.launched(drawn, launched.states)
        vectors = None if pooled.is_empty else PooledPass.launch(pooled, self.runner, self.slots)
        self._count(plan)
        self.slots.launched(drawn, launched.undrawn is not None)
        return self.postprocess.launched(plan, readout, launched, started, vectors)

    def collect(self) -> None:
        """Read and process the tokens of the oldest launched step."""
        ticket = self.in_flight.popleft()
        self.postprocess.collect(ticket, self._outbox)
        if self.tiers is not None:
            self.tiers.collected(ticket.plan, ticket.started)
        if self.speculator is not None:
            self.speculator.collected(ticket.plan, ticket.started)

    def draw(self) -> None:
        """Launch the late draw of the newest step: its masks depend on the tokens of the steps before it."""
        while len(self.in_flight) > 1:
            self.collect()
        ticket = self.in_flight[-1]
        ticket.launched.draw(ticket.readout, self.slots)

    def take_back(self) -> list[Request]:
        """Discard all launched steps and preempt all running sequences; return their requests, oldest first.

        Used after every failure: uncollected steps are discarded, full blocks of collected steps stay in the prefix
        cache, and sampling repeats the same tokens because its noise depends on seed and position only.
        """
        self.in_flight.clear()
        self.batcher.evict_completed()
        running = [slot.held for slot in self.batcher.active_slots()]
        requests = {sequence.request.request_id: sequence.request for sequence in running}
        for sequence in running:
            if self.batcher.slot_of(sequence) is not None and not sequence.is_dormant:
                self.batcher.preempt(sequence)
        return sorted(requests.values(), key=lambda request: request.number)

    @property
    def has_work(self) -> bool:
        is_parked = self.faults.is_active and self.faults.num_parked > 0
        is_landing = self.tiers is not None and self.tiers.has_tickets  # blocks are held for them
        return bool(self.in_flight or self._outbox) or self.batcher.has_work or is_parked or is_landing

    # -- requests ---------------------------------------------------------------------------------------------------
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequences[int],
        params: SamplingParams | BeamSearchParams | PoolingParams,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """Queue a request; one that cannot be served is rejected here, before any state changes.

        Beam searches and requests for vectors run in the same batches as all other requests.
        """
        return self._enqueue(self.factory.new_request(request_id, prompt_token_ids, params, **options))

    add_beam_search = add_request

    def abort(self, request_id: str) -> bool:
        """End a request between two steps; False if it is unknown or finished."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._outbox.extend(self.batcher.finish(request, FinishReason.ABORT))
        return True

    def stop(self, request_id: str, index: int, stop_reason: str) -> None:
        """End one completion at a stop text that the reader of its tokens has found; no error if it ended before."""
        request = self.requests.get(request_id)
        sequence = None if request is None or request.search is not None else request.sequences[index]
        if request is None or sequence is None or sequence.finish_reason is not None:
            return
        sequence.stop_reason = stop_reason
        self._outbox.extend(self.batcher.finish(request, FinishReason.STOP, [sequence]))

    def abort_all(self) -> None:
        for request_id in list(self.requests):
            self.abort(request_id)

    def close(self) -> None:
        """End all requests, the processes of other ranks, and the tiers once all blocks are written."""
        self.abort_all()
        self.close_tiers()
        if self.runner.peers is not None:
            self.runner.peers.close()

    def close_tiers(self) -> None:
        """Write the blocks that wait for the tiers."""
        if self.tiers is not None:
            self.tiers.close()

    def stats(self) -> EngineStats:
        self._counters.read_state(self.batcher, self.blocks, self.faults.num_parked)
        self._counters.sharing = self.shares.get_stats()
        self._counters.num_forced_tokens = self.slots.forced.num_tokens
        if self.tiers is not None:
            self._counters.tiers = self.tiers.stats()
        return self._counters

    def reset_stats(self) -> None:
        """Set all counters to 0."""
        self._counters = EngineStats()
        self.batcher.num_prompt_tokens = self.batcher.num_cached_tokens = self.slots.forced.num_tokens = 0

    # -- slots (called by the batcher) ------------------------------------------------------------------------------
    def slot_taken(self, slot: int, sequence: Sequence) -> None:
        if sequence.request.pooling is None:
            self.slots.set_slot(slot, sequence, frozenset(self.model.config.eos_token_ids))
            self.batcher.slots[slot].waits_for_tokens = self._waits_for_tokens(slot)
        self.phases.track(sequence)
        if self.tiers is not None:
            self.tiers.admitted(sequence)

    def slot_freed(self, slot: int, sequence: Sequence) -> None:
        if sequence.request.pooling is None:
            self.slots.clear_slot(slot)
        self.phases.remove_sequence(sequence.id)
        if self.speculator is not None:
            self.speculator.drafter.forget(sequence)

    # -- details ----------------------------------------------------------------------------------------------------
    def _enqueue(self, request: Request) -> Request:
        self.batcher.add(request)
        request.metrics.weight_version = self.weight_version
        self.requests[request.request_id] = request
        return request

    def _new_slots(self) -> SlotState:
        config, kernels = self.config, self.runner.kernels
        max_blocks = self.blocks.blocks_for(config.max_model_len) + 1
        vocab = self.model.config.vocab_size
        sizes = SlotSizes(
            config.max_num_seqs, max_blocks, config.max_model_len, vocab, config.chunk_size, config.adapters.max_loras
        )
        has_tokens = self.model.config.language_head
        device = kernels.device_slots(self.runner.network, self.runner.storage, sizes) if has_tokens else None
        sampler = Sampler(vocab, SamplingTable(config.max_num_seqs, vocab))
        return SlotState(self.blocks, kernels, sampler, max_blocks, device, config.speculative is not None)

    def _waits_for_tokens(self, slot: int) -> bool:
        """Whether the next draw of a slot depends on its tokens: drafts do unless they rest, some options do too."""
        has_drafts = self.speculator is not None and not self.speculator.runs_ahead
        return has_drafts or self.slots.waits_for_tokens(slot)

    def _room_for_drafts(self, slots: list[BatchSlot], speculator: Speculator) -> dict[int, int]:
        was_ahead = speculator.runs_ahead
        may_draft = speculator.begins_step(len(slots), is_behind=bool(self.in_flight))
        if speculator.runs_ahead != was_ahead:
            for slot in self.batcher.slots:
                slot.waits_for_tokens = slot.sequence is not None and self._waits_for_tokens(slot.index)
        if not may_draft:
            return {}
        ready = (slot.held for slot in slots if slot.sequence is not None and not slot.held.num_expected)
        return speculator.room([sequence for sequence in ready if sequence.phase is RequestPhase.DECODE])

    def _deliver(self) -> list[StepResult]:
        results, self._outbox = self._outbox, []
        results.extend(self.progress.observe(results))
        for result in results:
            if result.finished:
                request = self.requests.get(result.request_id)
                if request is not None and request.is_finished:
                    del self.requests[result.request_id]
        if not self.requests:
            self.batcher.evict_completed()  # no later step would
        return results

    def _count(self, plan: StepPlan) -> None:
        counters = self._counters
        counters.num_steps += 1
        is_plain = plan.is_uniform or self.speculator is None
        counters.num_decode_tokens += len(plan.decodes) if is_plain else sum(item.num_new for item in plan.decodes)
        counters.num_prefill_tokens += sum(item.num_new for item in plan.prefills)
        counters.num_preemptions += len(plan.preempted)
