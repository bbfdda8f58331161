"""Running a plan on the device: `PrefillExecutor` and `DecodeExecutor`.

    PrefillExecutor  steps with prompt tokens: packed sequences, large products, logits for last tokens only
    DecodeExecutor   steps of decode tokens (and drafts) alone: CUDA graphs on a GPU, a recorded program on the CPU

`launch` queues the pass and its sampling; on a GPU it returns before they have run. `PrefillExecutor.execute` and
`DecodeExecutor.step` run one sequence outside an engine, on a `KvCacheEntry`: embeddings and `LanguageModel.decode` use
them. Blocks are reserved before a pass runs; a pass that fails releases its reservation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bifolio.cache.block_table import padded
from bifolio.cache.storage import CacheLayout, KvCacheEntry, KVStorage
from bifolio.config import CacheConfig
from bifolio.engine.host_batch import HostBatch, Readout, Run
from bifolio.engine.slot_state import Draws, SlotState
from bifolio.errors import ConfigError, EmptyPromptError, PhaseError, TokenIdError
from bifolio.kernels.interface import (
    Array,
    AttentionPhase,
    AttentionSegment,
    Batch,
    KernelSet,
    Network,
    StepProgram,
    Storage,
)
from bifolio.model import transformer
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import ModelWeights, OnLoad, prepare
from bifolio.schedule.orchestrators import DecodeOrchestrator
from bifolio.schedule.plan import StepPlan


@dataclass(frozen=True, slots=True)
class ModelRunner:
    """The weights, kernels and KV storage of one model."""

    weights: ModelWeights
    kernels: KernelSet
    storage: KVStorage

    @classmethod
    def new(
        cls,
        model: LoadedModel,
        cache: CacheConfig,
        kernels: KernelSet,
        on_load: OnLoad = lambda done, total: None,
    ) -> ModelRunner:
        """Prepare a model's weights and allocate its paged cache."""
        config = model.config
        layout = CacheLayout(
            config.num_layers,
            cache.num_blocks,
            cache.block_size,
            config.num_kv_heads,
            config.head_dim,
            cache.dtype,
            cache.poison_free_blocks,
            config.mla is not None,
        )
        return cls(prepare(model.weights, kernels, on_load), kernels, kernels.new_storage(layout))

    def run(self, batch: Batch) -> Array:
        """Logits f32[r, vocab] of the batch's `logit_rows`, kernel by kernel; K and V of all tokens are cached."""
        return transformer.forward(self.weights, batch, self.kernels, self.storage)

    @property
    def network(self) -> Network:
        """The forward pass as the kernel set records it."""
        weights = self.weights

        def forward(kernels: KernelSet, batch: Batch, storage: Storage | None) -> Array:
            return transformer.forward(weights, batch, kernels, storage)

        def decode_segment(count: int) -> AttentionSegment:
            ones = np.ones(count, dtype=np.int32)
            return DecodeOrchestrator.lay_out(ones - 1, ones, None)

        return Network(
            forward,
            tuple(layer.shape for layer in weights.layers),
            decode_segment,
            tuple(zip(weights.inverse_frequencies, weights.rope_scales, strict=True)),
        )


@dataclass(slots=True)
class Launched:
    """A launched pass: its draws, and the logits for beam search and prompt logprobs."""

    draws: Draws | None
    logits: Array | None  # f32[r, vocab]; None when only sampling reads them


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """The state after a prompt."""

    kv_len: int  # tokens in the cache after the prompt
    num_chunks: int
    logits: Array  # f32[vocab] of the last token


class _Executor:
    """Base of both executors: the program of the phase, and passes on given sequences."""

    phase: AttentionPhase

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._program: StepProgram | None = None
        self._is_recorded = False

    @property
    def program(self) -> StepProgram | None:
        """The recorded pass of this phase, recorded on first use; None where the kernel set records no programs."""
        if not self._is_recorded:
            self._program = self.runner.kernels.record(self.runner.network, self.phase)
            self._is_recorded = True
        return self._program

    def run(self, batch: Batch) -> Array:
        """Logits f32[r, vocab] of the batch's `logit_rows`; K and V of all tokens are written to the cache."""
        program = self.program
        return self.runner.run(batch) if program is None else program.run(batch, self.runner.storage)

    def launch(self, plan: StepPlan, readout: Readout, slots: SlotState) -> Launched:
        """Queue the pass of a plan and its sampling."""
        logits = self.run(slots.lay_out(plan, readout))
        draws = slots.draw(logits, readout)
        return Launched(draws, None if readout.is_plain else logits)

    def append(
        self,
        kv_caches: Sequence[KvCacheEntry],
        tokens: Sequence[Sequence[int]],
        run: Callable[[Batch], Array] | None = None,
    ) -> Array:
        """One pass over new tokens at the end of each sequence: f32[s, vocab], the logits of their last tokens.

        `run` replaces the pass. An error leaves all sequences unchanged.
        """
        starts = [entry.seq_len for entry in kv_caches]
        try:
            batch = append_batch(kv_caches, tokens, self.phase, self.runner.weights.config.vocab_size)
            return (run or self.run)(batch.to(self.runner.kernels))
        except BaseException:
            for entry, start in zip(kv_caches, starts, strict=True):
                entry.truncate(start)
            raise


class PrefillExecutor(_Executor):
    """Processes prompt tokens in parallel, `chunk_size` at a time. Bound by compute."""

    phase = AttentionPhase.PREFILL

    def __init__(self, runner: ModelRunner, chunk_size: int = 512) -> None:
        super().__init__(runner)
        if chunk_size < 1:
            raise ConfigError(f"chunk_size must be at least 1, not {chunk_size}")
        self.chunk_size = chunk_size

    def chunks(
        self, tokens: Sequence[int], kv_cache: KvCacheEntry, run: Callable[[Batch], Array] | None = None
    ) -> Iterator[Array]:
        """The output of `run` (by default the last token's logits) for each chunk of a prompt, one at a time.

        A chunk reads the entries that earlier chunks wrote.
        """
        if not len(tokens):
            raise EmptyPromptError("a prompt has at least one token")
        for start in range(0, len(tokens), self.chunk_size):
            yield self.append([kv_cache], [tokens[start : start + self.chunk_size]], run)

    def execute(self, tokens: Sequence[int], kv_cache: KvCacheEntry) -> PrefillResult:
        """Prefill a whole prompt into one sequence's cache; an error in any chunk leaves the sequence unchanged."""
        start = kv_cache.seq_len
        try:
            logits = list(self.chunks(tokens, kv_cache))
        except BaseException:
            kv_cache.truncate(start)
            raise
        return PrefillResult(kv_cache.seq_len, len(logits), logits[-1][0])


class DecodeExecutor(_Executor):
    """Generates one token at a time with minimal latency. Bound by memory bandwidth and launches."""

    phase = AttentionPhase.DECODE

    def launch(self, plan: StepPlan, readout: Readout, slots: SlotState) -> Launched:
        """Queue a decode step: a CUDA graph replay on a device that keeps the slots, else a plain pass."""
        on_device = slots.decodes_on_device(plan)
        if on_device is None or slots.device is None:
            return super().launch(plan, readout, slots)
        if readout.is_plain:
            draws = slots.draw_with_pass(plan, on_device)
            if draws is not None:
                return Launched(draws, None)
        logits = slots.device.decode_logits(on_device)
        return Launched(slots.draw(logits, readout), None if readout.is_plain else logits)

    def step(self, kv_cache: KvCacheEntry, token: int) -> int:
        """Append the newest token and return the most likely next one."""
        return int(self.runner.kernels.to_host(self.logits(kv_cache, token)).argmax())

    def logits(self, kv_cache: KvCacheEntry, token: int) -> Array:
        """Append the newest token; f32[vocab] for the next one."""
        if kv_cache.seq_len == 0:
            raise PhaseError("decode before prefill: the cache of this sequence is empty; run prefill first")
        return self.append([kv_cache], [[token]])[0]

    def generate(self, kv_cache: KvCacheEntry, first: int, max_tokens: int) -> list[int]:
        """Greedy tokens, beginning with `first`, the token after the prompt; at most `max_tokens`."""
        tokens = [first][:max_tokens]
        while len(tokens) < max_tokens:
            tokens.append(self.step(kv_cache, tokens[-1]))
        return tokens


def append_batch(
    kv_caches: Sequence[KvCacheEntry],
    tokens: Sequence[Sequence[int]],
    phase: AttentionPhase,
    vocab_size: int,
) -> HostBatch:
    """Reserve new tokens at the end of each sequence and lay out their pass, with the last tokens' logits."""
    runs: list[Run] = []
    for number, (entry, new) in enumerate(zip(kv_caches, tokens, strict=True)):
        ids = np.asarray(new)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TokenIdError("tokens must be one list of whole numbers")
        if not len(ids):
            raise EmptyPromptError("a pass needs at least one token of each sequence")
        if not 0 <= ids.min() <= ids.max() < vocab_size:
            raise TokenIdError(f"a token id is outside the vocabulary of {vocab_size} tokens")
        runs.append(Run(number, entry.seq_len, ids.astype(np.int32)))
    for entry, run in zip(kv_caches, runs, strict=True):
        entry.reserve(len(run.tokens))
    tables = padded([entry.block_ids for entry in kv_caches])
    last = np.cumsum([len(run.tokens) for run in runs]) - 1
    decodes, prefills = (runs, []) if phase is AttentionPhase.DECODE else ([], runs)
    return HostBatch.from_runs(decodes, prefills, tables, kv_caches[0].storage.block_size, last.tolist())
