"""The engine: one step runs every active sequence once, and requests come and go between steps.

One thread owns an engine. Other threads talk to it by queue (see `api.async_llm`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any

import numpy as np

from bifolio.beam_params import BeamSearchParams
from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.storage import KVStorage
from bifolio.config import CacheConfig, EngineConfig, ModelConfig
from bifolio.engine.executor import DecodeExecutor, ModelRunner, PrefillExecutor
from bifolio.engine.fault.out_of_memory import MemoryRecovery, is_out_of_memory
from bifolio.engine.host_batch import DeviceRows, Readout
from bifolio.engine.memory import weight_bytes
from bifolio.engine.postprocess import Recorder
from bifolio.engine.requests import RequestIntake
from bifolio.engine.speculative.draft_lengths import DraftLengths
from bifolio.engine.speculative.draft_model import DraftModelDrafter, check_pair
from bifolio.engine.speculative.speculator import NgramDrafter, Speculator
from bifolio.errors import ConfigError, RequestError
from bifolio.kernels.interface import Array, KernelSet
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import prepare
from bifolio.sampling.sampler import SampledTokens, Sampler, SamplingTable
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.batcher import ContinuousBatcher
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.phases import PhaseManager
from bifolio.schedule.plan import StepPlan
from bifolio.sequence import FinishReason, Request, RequestPhase, Sequence, StepResult


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and the state at the moment of asking."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of admitted requests
    num_cached_tokens: int = 0  # of those, found in the prefix cache
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    utilisation: float = 1.0  # filled token slots over the slots of all blocks in use


class InferenceEngine:
    """Continuous batching over one paged cache."""

    def __init__(
        self, model: LoadedModel, config: EngineConfig, kernels: KernelSet, draft_model: LoadedModel | None = None
    ) -> None:
        self.model = model
        self.config = config
        network, cache = model.config, config.cache
        self.blocks = KVCacheBlockManager(
            cache.num_blocks, cache.block_size, enable_prefix_caching=cache.enable_prefix_caching
        )
        self.storages = [new_storage(network, cache, kernels)]  # the model's own, then the draft model's
        if cache.poison_free_blocks:
            self.blocks.on_free = self._poison
        self.runner = ModelRunner(prepare(model.weights, kernels), kernels, self.storages[0])
        self.prefill_executor = PrefillExecutor(self.runner, config.chunk_size)
        self.decode_executor = DecodeExecutor(self.runner)
        self.table = SamplingTable(config.max_num_seqs, network.vocab_size)
        self.sampler = Sampler(network.vocab_size, self.table)
        self.rows = self._new_rows(kernels)
        self.speculator = self._new_speculator(draft_model)
        self.batcher = ContinuousBatcher(
            config.max_num_seqs, self.blocks, listener=self, max_waiting=config.max_waiting
        )
        self.phases = PhaseManager(
            PrefillOrchestrator(self.blocks),
            DecodeOrchestrator(self.blocks),
            chunk_size=config.chunk_size,
            preempt=self.batcher.preempt,
            drop_kept=self.batcher.drop_kept,
        )
        self.recorder = Recorder(self.batcher, self.blocks, self.sampler, kernels, self.speculator)
        self.recovery = MemoryRecovery(self)
        self.requests: dict[str, Request] = {}  # not finished yet
        self.intake = RequestIntake(model, config, self.blocks, self.requests)
        self._counters = EngineStats()
        self._outbox: list[StepResult] = []  # ends that happened outside a step

    # -- one step -----------------------------------------------------------------------------------------------
    def step(self) -> list[StepResult]:
        """Run every active sequence once; say what became of each. Running out of memory fails the step alone."""
        try:
            results = self._step()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)  # whose frames hold what the step had allocated
        else:
            if self.recovery.step_succeeded():
                self._more_may_run()
            return results
        results = self.recovery.recover(failure)
        self._more_may_run()
        return self._deliver(results)

    def _step(self) -> list[StepResult]:
        self.batcher.evict_completed()  # rows and blocks go back
        self._count_admitted(self.batcher.admit_pending())  # a slot each, opened on the cached prefix
        plan = self.phases.plan(self.batcher.active_slots(), self.recovery.token_budget, self._room_for_drafts())
        if plan.is_empty:
            if not self.has_work:
                self.blocks.check_invariants()  # idle: prove that nothing leaked
            return self._deliver([])
        started = time.perf_counter()
        for storage in self.storages:
            storage.copy_blocks(plan.copies)  # copy-on-write, before any write
        self.rows.update(plan)  # differences to the device rows
        if self.speculator is not None:
            plan = self.speculator.fill(plan)  # guesses; a draft model runs here
        batch, readout = self.rows.stage(plan)
        executor = self.prefill_executor if plan.prefills else self.decode_executor
        logits = executor.run(batch)  # one flat forward; attention once per segment
        self.recorder.publish_prompts(plan)
        sampled = self._sample(logits, readout)  # verifies drafts
        if self.speculator is not None and not plan.prefills:
            self.speculator.observe_step(batch.num_tokens, time.perf_counter() - started)
        results: list[StepResult] = []
        try:
            self.recorder.record(plan, readout, logits, sampled, results)
        except Exception:
            self._outbox.extend(results)  # what was recorded before the error is told all the same
            raise
        self._count(plan)
        return self._deliver(results)

    def _more_may_run(self) -> None:
        """Called when those who wait should be looked at again."""

    def _sample(self, logits: Array, readout: Readout) -> SampledTokens | None:
        if not readout.sample_rows:
            return None
        if readout.sample_rows != list(range(logits.shape[0])):
            logits = self.runner.kernels.take(logits, np.asarray(readout.sample_rows, dtype=np.int32))
        pending = readout.pending if any(readout.pending) else None
        return self.sampler.sample(logits, readout.sample_slots, readout.positions, pending)

    def _room_for_drafts(self) -> dict[int, int]:
        if self.speculator is None:
            return {}
        slots = self.batcher.active_slots()
        return self.speculator.room([slot.held for slot in slots if slot.phase is RequestPhase.DECODE])

    @property
    def has_work(self) -> bool:
        return self.batcher.has_work or bool(self._outbox)

    # -- requests ---------------------------------------------------------------------------------------------------
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequences[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        salt: bytes = b"",
    ) -> Request:
        """Queue a request; what cannot be served is refused here, before it touches anything."""
        request = self.intake.new_request(request_id, prompt_token_ids, params, prompt, priority, salt)
        self.intake.add_completions(request)
        return self._enqueue(request)

    def add_beam_search(
        self,
        request_id: str,
        prompt_token_ids: Sequences[int],
        params: BeamSearchParams,
        *,
        prompt: str | None = None,
        priority: int = 0,
        salt: bytes = b"",
    ) -> Request:
        """Queue a beam search; it runs in the same batches as everything else."""
        request = self.intake.new_request(request_id, prompt_token_ids, params.sampling, prompt, priority, salt)
        self.intake.add_beams(request, params)
        return self._enqueue(request)

    def keep(self, request_id: str) -> bool:
        """Hold on to the conversation after its end, so that `fork` can continue it without recomputing anything.

        Kept conversations are given up, the oldest first, when their blocks are needed; False if it is not running.
        """
        request = self.requests.get(request_id)
        if request is not None:
            request.keep = True
        return request is not None

    def fork(
        self, request_id: str, new_request_id: str, token_ids: Sequences[int], params: SamplingParams, **options: Any
    ) -> Request:
        """Branch a kept conversation: its tokens, then `token_ids`, then what the model generates.

        If it was given up meanwhile, `RequestError`: send the whole conversation as a new request instead.
        """
        parent = self.batcher.kept(request_id)
        if parent is None:
            raise RequestError(f"no conversation is kept under {request_id!r}: send it whole, as a new request")
        salt = parent.request.salt
        request = self.intake.new_request(new_request_id, [*parent.token_ids, *token_ids], params, salt=salt, **options)
        self.intake.add_completions(request)
        first = request.sequences[0]
        self.blocks.fork(parent.id, first.id)
        try:
            self.blocks.truncate(first.id, min(parent.num_computed, first.num_tokens - 1))
            first.num_draft_computed = min(parent.num_draft_computed, first.num_tokens - 1)
            return self._enqueue(request)
        except BaseException:
            self.blocks.release(first.id)
            raise

    def release(self, request_id: str) -> bool:
        """Give up a kept conversation."""
        return self.batcher.drop_kept(request_id)

    def abort(self, request_id: str) -> bool:
        """End a request now, at any moment between two steps; False if it is not known (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._outbox.extend(self.batcher.finish(request, FinishReason.ABORT))
        return True

    def abort_all(self) -> None:
        for request_id in list(self.requests):
            self.abort(request_id)

    def stats(self) -> EngineStats:
        now = self._counters
        now.num_running, now.num_waiting = self.batcher.num_running, self.batcher.num_waiting
        now.num_blocks, now.num_used_blocks = self.blocks.num_blocks - 1, self.blocks.num_used_blocks
        now.utilisation = self.blocks.utilisation()
        return now

    # -- rows change hands (called by the batcher) ------------------------------------------------------------------
    def slot_taken(self, slot: int, sequence: Sequence) -> None:
        request = sequence.request
        grammar: Any = request.params.grammar  # compiled when the request was added
        self.table.set(
            slot,
            request.params,
            sequence.seed,
            request.prompt_array,
            sequence.output_token_ids,
            frozenset(self.model.config.eos_token_ids),
            mask=None if grammar is None else grammar.follow(sequence.output_token_ids),
        )
        self.phases.track(sequence)

    def slot_freed(self, slot: int, sequence: Sequence) -> None:
        self.table.clear(slot)
        self.phases.remove_sequence(sequence.id)
        if self.speculator is not None:
            self.speculator.drafter.forget(sequence)

    # -- details ----------------------------------------------------------------------------------------------------
    def _enqueue(self, request: Request) -> Request:
        self.batcher.add(request)
        self.requests[request.request_id] = request
        return request

    def _new_speculator(self, draft_model: LoadedModel | None) -> Speculator | None:
        config = self.config.speculative
        if config is None:
            return None
        if config.method == "ngram":
            return Speculator(config, NgramDrafter(config), self.config.max_model_len)
        if draft_model is None:
            raise ConfigError("speculative method 'draft' needs a draft model: pass draft_model=...")
        check_pair(self.model, draft_model)
        kernels = self.runner.kernels
        storage = new_storage(draft_model.config, self.config.cache, kernels)
        self.storages.append(storage)
        runner = ModelRunner(prepare(draft_model.weights, kernels), kernels, storage)
        drafter = DraftModelDrafter(runner, self.rows, self.sampler, self.config.chunk_size)
        costs = [weight_bytes(m.weights, kernels.formats) for m in (draft_model, self.model)]
        relative_cost = costs[0] / max(costs[1], 1)
        lengths = DraftLengths(config.length, config.adaptive, drafter.costs, relative_cost)
        return Speculator(config, drafter, self.config.max_model_len, lengths)

    def _new_rows(self, kernels: KernelSet) -> DeviceRows:
        max_blocks = self.blocks.blocks_for(self.config.max_model_len) + 1
        return DeviceRows(self.config.max_num_seqs, max_blocks, self.blocks, kernels)

    def _poison(self, block_ids: list[int]) -> None:
        for storage in self.storages:
            storage.poison_blocks(block_ids)

    def _deliver(self, results: list[StepResult]) -> list[StepResult]:
        results = [*self._outbox, *results]
        self._outbox = []
        for result in results:
            request = self.requests.get(result.request_id)
            if result.finished and request is not None and request.is_finished:
                del self.requests[result.request_id]
        if not self.requests:
            self.batcher.evict_completed()  # nobody will call for the last ones' rows
        return results

    def _count_admitted(self, admitted: list[Sequence]) -> None:
        for sequence in admitted:
            metrics = sequence.request.metrics
            if not metrics.num_preemptions:  # one that comes back was counted before
                self._counters.num_prompt_tokens += sequence.num_prompt
                self._counters.num_cached_tokens += metrics.num_cached_tokens

    def _count(self, plan: StepPlan) -> None:
        counters = self._counters
        counters.num_steps += 1
        counters.num_decode_tokens += sum(item.num_new for item in plan.decodes)
        counters.num_prefill_tokens += sum(item.num_new for item in plan.prefills)
        counters.num_preemptions += len(plan.preempted)


def new_storage(network: ModelConfig, cache: CacheConfig, kernels: KernelSet) -> KVStorage:
    storage_class: type[KVStorage] = getattr(kernels, "storage_class", KVStorage)
    return storage_class(
        network.num_layers,
        cache.num_blocks,
        cache.block_size,
        network.num_kv_heads,
        network.head_dim,
        cache.dtype,
        device=kernels.device,
        backend="torch" if kernels.array_backend == "torch" else "numpy",
        poison=cache.poison_free_blocks,
    )
