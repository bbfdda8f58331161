"""The engine: one step runs every active sequence once, and requests come and go between steps.

One thread owns an engine. Other threads talk to it by queue (see `run.async_llm`).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.cache.storage import KVStorage
from bifolio.config import EngineConfig
from bifolio.errors import EmptyPromptError, PromptTooLongError, RequestError, TokenIdError
from bifolio.kernels.interface import KernelSet
from bifolio.model.detokenizer import IncrementalDetokenizer
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import prepare
from bifolio.run.device_rows import DeviceRows
from bifolio.run.executor import DecodeExecutor, ModelRunner, PrefillExecutor
from bifolio.run.recorder import Recorder
from bifolio.run.sampler import Sampler, SamplingTable
from bifolio.run.sampling.noise import child_seed
from bifolio.run.stopping import StopChecker
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.batcher import ContinuousBatcher
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.phases import PhaseManager
from bifolio.schedule.plan import StepPlan
from bifolio.sequence import FinishReason, Request, Sequence, StepResult


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

    def __init__(self, model: LoadedModel, config: EngineConfig, kernels: KernelSet) -> None:
        self.model = model
        self.config = config
        network, cache = model.config, config.cache
        self.blocks = KVCacheBlockManager(
            cache.num_blocks, cache.block_size, enable_prefix_caching=cache.enable_prefix_caching
        )
        self.storage = KVStorage(
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
        if cache.poison_free_blocks:
            self.blocks.on_free = self.storage.poison_blocks
        self.runner = ModelRunner(prepare(model.weights, kernels), kernels, self.storage)
        self.prefill_executor = PrefillExecutor(self.runner, config.chunk_size)
        self.decode_executor = DecodeExecutor(self.runner)
        self.table = SamplingTable(config.max_num_seqs, network.vocab_size)
        self.sampler = Sampler(network.vocab_size, self.table)
        self.rows = DeviceRows(
            config.max_num_seqs, self.blocks.blocks_for(config.max_model_len) + 1, self.blocks, kernels
        )
        self.batcher = ContinuousBatcher(
            config.max_num_seqs, self.blocks, listener=self, max_waiting=config.max_waiting
        )
        self.phases = PhaseManager(
            PrefillOrchestrator(self.blocks),
            DecodeOrchestrator(self.blocks),
            chunk_size=config.chunk_size,
            preempt=self.batcher.preempt,
        )
        self.recorder = Recorder(self.batcher, self.blocks)
        self.requests: dict[str, Request] = {}  # not finished yet
        self._counters = EngineStats()
        self._num_requests = 0
        self._outbox: list[StepResult] = []  # ends that happened outside a step

    # -- one step -----------------------------------------------------------------------------------------------
    def step(self) -> list[StepResult]:
        """Run every active sequence once; say what became of each."""
        self.batcher.evict_completed()  # rows and blocks go back
        self.batcher.admit_pending()  # a slot each, opened on the cached prefix
        plan = self.phases.plan(self.batcher.active_slots(), self.config.token_budget)
        if plan.is_empty:
            if not self.has_work:
                self.blocks.check_invariants()  # idle: prove that nothing leaked
            return self._deliver([])
        staged = self.rows.stage(plan)  # differences to the device rows, then gather
        self.storage.copy_blocks(plan.copies)  # copy-on-write, before any write
        executor = self.prefill_executor if plan.prefills else self.decode_executor
        logits = executor.run(staged.batch)  # one flat forward; attention once per segment
        sampled = None
        if len(staged.sample_rows):
            drawn_from = self.runner.kernels.take(logits, staged.sample_rows)
            sampled = self.sampler.sample(drawn_from, staged.sample_slots, staged.positions)
        results = self.recorder.record(plan, staged, logits, sampled)
        self._count(plan)
        return self._deliver(results)

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
        prompt_ids = [int(token) for token in prompt_token_ids]
        self._check(request_id, prompt_ids, params)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        room = self.config.max_model_len - len(prompt_ids)
        request = Request(
            request_id=request_id,
            number=self._num_requests,
            prompt_token_ids=prompt_ids,
            params=self._resolved(params),
            seed=seed,
            prompt=prompt,
            priority=priority,
            salt=salt,
            max_tokens=room if params.max_tokens is None else min(room, params.max_tokens),
        )
        for index in range(params.num_sequences):
            request.sequences.append(self._new_sequence(request, index))
        self.batcher.add(request)
        self._num_requests += 1
        self.requests[request_id] = request
        return request

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
        self.table.set(
            slot,
            request.params,
            sequence.seed,
            request.prompt_token_ids,
            sequence.output_token_ids,
            frozenset(self.model.config.eos_token_ids),
        )
        self.phases.track(sequence)

    def slot_freed(self, slot: int, sequence: Sequence) -> None:
        self.table.clear(slot)
        self.phases.remove_sequence(sequence.id)

    # -- details ----------------------------------------------------------------------------------------------------
    def _new_sequence(self, request: Request, index: int) -> Sequence:
        tokenizer = self.model.tokenizer if request.params.detokenize else None
        detokenizer = None
        if tokenizer is not None:
            detokenizer = IncrementalDetokenizer(
                tokenizer, request.prompt_token_ids, request.params.skip_special_tokens
            )
        return Sequence(
            id=self.blocks.fresh_sequence_id(),
            request=request,
            index=index,
            token_ids=list(request.prompt_token_ids),
            num_prompt=len(request.prompt_token_ids),
            seed=child_seed(request.seed, index),
            parent=request.sequences[0] if index else None,
            stopper=StopChecker(
                request.params,
                self.model.config.eos_token_ids,
                len(request.prompt_token_ids),
                self.config.max_model_len,
                detokenizer,
            ),
        )

    def _check(self, request_id: str, prompt_ids: list[int], params: SamplingParams) -> None:
        if request_id in self.requests:
            raise RequestError(f"a request {request_id!r} is running already: choose another id")
        if not prompt_ids:
            raise EmptyPromptError("the prompt is empty: pass at least one token")
        vocab = self.model.config.vocab_size
        for token in prompt_ids:
            if not 0 <= token < vocab:
                raise TokenIdError(f"the token id {token} is outside the vocabulary of {vocab} tokens")
        limit = self.config.max_model_len - (0 if params.max_tokens == 0 else 1)
        if len(prompt_ids) > limit:
            raise PromptTooLongError(
                f"the prompt has {len(prompt_ids)} tokens and {limit} fit (max_model_len="
                f"{self.config.max_model_len}, at least one is generated): shorten it or raise max_model_len"
            )
        params.validate_for(vocab)
        if params.stop and self.model.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this model has none: use stop_token_ids")

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        tokenizer = self.model.tokenizer
        if tokenizer is None:
            return params.resolve_strings(lambda text: [])
        return params.resolve_strings(lambda text: tokenizer.encode(text, add_special_tokens=False))

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

    def _count(self, plan: StepPlan) -> None:
        counters = self._counters
        counters.num_steps += 1
        counters.num_decode_tokens += sum(item.num_new for item in plan.decodes)
        counters.num_prefill_tokens += sum(item.num_new for item in plan.prefills)
        counters.num_preemptions += len(plan.preempted)
