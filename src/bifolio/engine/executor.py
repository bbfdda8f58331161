"""Running a plan on the device: `PrefillExecutor` and `DecodeExecutor`.

    PrefillExecutor  steps with prompt tokens: packed sequences, large products, logits for last tokens only
    DecodeExecutor   steps of decode tokens (and drafts) alone: CUDA graphs on a GPU, a recorded program on the CPU

`launch` queues the pass and its sampling; on a GPU it returns before they have run. `PrefillExecutor.execute` and
`DecodeExecutor.step` run one sequence outside an engine, on a `KvCacheEntry`: embeddings and `LanguageModel.decode` use
them. Blocks are reserved before a pass runs; a pass that fails releases its reservation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import numpy as np

from bifolio.cache.block_table import padded
from bifolio.cache.storage import CacheLayout, KvCacheEntry, KVStorage
from bifolio.config import CacheConfig, ModelConfig
from bifolio.engine.host_batch import HostBatch, Readout, Run
from bifolio.engine.images import ImageReader, has_images, reading_images
from bifolio.engine.slot_state import Draws, SlotState
from bifolio.errors import ConfigError, EmptyPromptError, PhaseError, TokenIdError
from bifolio.kernels.interface import (
    Adapter,
    Array,
    AttentionPhase,
    AttentionSegment,
    Batch,
    KernelSet,
    Network,
    SplitNetwork,
    StepProgram,
    Storage,
)
from bifolio.kernels.storage import BlockMover
from bifolio.long_rope import rope_of_length
from bifolio.model import transformer
from bifolio.model.adapters.sites import product_shapes, with_sites
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import ModelWeights, OnLoad, prepare
from bifolio.sampling.sampler import NOTHING, greedy_tokens, no_token_error
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.plan import StepPlan


class Pass(Enum):
    """The passes of a model, as rank 0 names them to other ranks."""

    PREFILL = 0
    DECODE = 1
    STATES = 2  # hidden states instead of logits, for embeddings
    IMAGES = 3  # prompts with rows in place of embeddings


class Peers(BlockMover, Protocol):
    """The other ranks of tensor parallelism, which run every pass with this one (`engine.parallel`)."""

    size: int  # ranks, this one included

    @property
    def splits_adapters(self) -> bool:
        """Whether each rank can have its part of an adapter."""
        ...

    def run(self, kind: Pass, batch: Batch, work: Callable[[], Array]) -> Array:
        """Start the pass on all other ranks and run `work`, this rank's part; an error discards the pass on all."""
        ...

    def prepare_adapter(self, adapter: Adapter, kernels: KernelSet) -> Adapter:
        """This rank's part of an adapter, prepared; the other ranks have theirs before the next pass."""
        ...

    def release_memory(self) -> None:
        """Return cached memory to the devices of the other ranks."""
        ...

    def read_blocks(self, block_ids: Sequence[int], part_bytes: Sequence[int]) -> list[np.ndarray]:
        """u8[n, part bytes] of each other rank. `part_bytes`: of a block on every rank, this one included."""
        ...

    def write_blocks(self, block_ids: Sequence[int], parts: Sequence[np.ndarray]) -> None:
        """Store u8[n, part bytes] on each other rank; `parts` has this rank's as well."""
        ...

    def close(self) -> None:
        """End the other ranks."""
        ...


@dataclass(slots=True, eq=False)
class ModelRunner:
    """The weights, kernels and KV storage of one model, or of one rank's part of it."""

    weights: ModelWeights
    kernels: KernelSet
    storage: KVStorage
    peers: Peers | None = None  # the ranks that hold the other parts
    images: ImageReader | None = None  # None: the model reads text only
    programs: dict[Pass, StepProgram | None] = field(default_factory=dict)  # recorded on first use; None: none are

    @classmethod
    def new(
        cls,
        model: LoadedModel,
        cache: CacheConfig,
        kernels: KernelSet,
        on_load: OnLoad = lambda done, total: None,
        peers: Peers | None = None,
    ) -> ModelRunner:
        """Prepare a model's weights and allocate its paged cache."""
        layout = CacheLayout.of_model(
            model.weights.config,
            cache.num_blocks,
            cache.block_size,
            cache.dtype,
            cache.poison_free_blocks,
            cache.num_states,
        )
        images = None
        if model.tower is not None and peers is None:
            images = ImageReader(model.tower, kernels)
        weights = with_sites(prepare(model.weights, kernels, on_load))
        if kernels.arena is not None:
            kernels.arena.adopt(weights)
        runner = cls(weights, kernels, kernels.new_storage(layout), peers, images)
        runner.exchange(weights)
        return runner

    def exchange(self, weights: ModelWeights) -> None:
        """Run later passes with these weights, as they are prepared from a model's files."""
        self.weights = weights if self.images is None else reading_images(weights, self.images.tower.layout)

    def run(self, batch: Batch) -> Array:
        """Logits f32[r, vocab] of the batch's `logit_rows`, kernel by kernel; K and V of all tokens are cached."""
        return transformer.forward(self.weights, batch, self.kernels, self.storage)

    def plain_states(self, batch: Batch) -> Array:
        """The normed hidden states of all tokens, [t, d], kernel by kernel."""
        return self._states(self.kernels, batch, self.storage)

    def states(self, batch: Batch) -> Array:
        """The normed hidden states of all tokens: [t, d], valid until the next pass; K and V are cached."""

        def work() -> Array:
            program = self.program(Pass.STATES)
            return self.plain_states(batch) if program is None else program.run(batch, self.storage)

        return work() if self.peers is None else self.peers.run(Pass.STATES, batch, work)

    def _states(self, kernels: KernelSet, batch: Batch, storage: Storage | None) -> Array:
        return kernels.norm(transformer.hidden_states(self.weights, batch, kernels, storage), self.weights.final_norm)

    def _from_rows(self, kernels: KernelSet, batch: Batch, storage: Storage | None) -> Array:
        return transformer.forward(self.weights, replace(batch, given=()), kernels, storage)

    def program(self, kind: Pass) -> StepProgram | None:
        """The recorded pass, recorded on first use; None where the kernel set records no programs."""
        if kind not in self.programs:
            forwards = {Pass.STATES: self._states, Pass.IMAGES: self._from_rows}
            network = replace(self.network, forward=forwards[kind]) if kind in forwards else self.network
            phase = AttentionPhase.DECODE if kind is Pass.DECODE else AttentionPhase.PREFILL
            self.programs[kind] = self.kernels.record(network, phase)
        return self.programs[kind]

    def with_taps(self, batch: Batch) -> Batch:
        """The batch with room for the hidden states that the weights give out."""
        width = len(self.weights.taps) * self.weights.config.hidden_size
        if self.kernels.array_backend == "numpy":
            return replace(batch, taps=np.empty((batch.num_tokens, width), np.float32))
        blank = self.kernels.from_host(np.zeros((1, width), np.float32))
        return replace(batch, taps=self.kernels.take(blank, np.zeros(batch.num_tokens, np.int32)))

    def release_memory(self) -> None:
        """Return cached memory to the devices of all ranks, after an out-of-memory error."""
        self.kernels.release_memory()
        if self.peers is not None:
            self.peers.release_memory()

    @property
    def network(self) -> Network:
        """The forward pass as the kernel set records it."""
        weights = self.weights

        def forward(kernels: KernelSet, batch: Batch, storage: Storage | None) -> Array:
            return transformer.forward(weights, batch, kernels, storage)

        def hidden(kernels: KernelSet, batch: Batch, storage: Storage | None) -> Array:
            return transformer.hidden_states(weights, batch, kernels, storage)

        def decode_segment(count: int) -> AttentionSegment:
            ones = np.ones(count, dtype=np.int32)
            return DecodeOrchestrator.lay_out(ones - 1, ones, None)

        def prompt_segment(count: int) -> AttentionSegment:
            return PrefillOrchestrator.lay_out(np.zeros(1, dtype=np.int32), np.full(1, count, dtype=np.int32), None)

        return Network(
            forward,
            tuple(layer.shape for layer in weights.layers if layer.has_attention),
            decode_segment,
            tuple(zip(weights.inverse_frequencies, weights.rope_scales, strict=True)),
            SplitNetwork(
                hidden,
                lambda kernels, x: transformer.read_out(weights, x, kernels),
                prompt_segment,
                len(weights.taps) * weights.config.hidden_size,
                rows_width=0 if self.images is None else transformer.rows_width(weights),
            ),
            product_shapes(weights),
        )


@dataclass(slots=True)
class Launched:
    """A launched pass: its draws, and the logits for beam search and prompt logprobs."""

    draws: Draws | None
    logits: Array | None  # f32[r, vocab]; None when only sampling reads them
    states: Array | None = None  # f32[t, taps * d]  hidden states of all tokens, if the launch asked for them
    undrawn: Array | None = None  # f32[r, vocab] whose draw waits for masks (`SlotState.draws_late`)

    def draw(self, readout: Readout, slots: SlotState) -> None:
        """Launch the draw that the launch of the pass left open; all steps before it are collected."""
        self.draws, self.undrawn = slots.draw(self.undrawn, readout), None


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
        self.kind = Pass[self.phase.name]

    def run(self, batch: Batch) -> Array:
        """Logits f32[r, vocab] of the batch's `logit_rows`; K and V of all tokens are written to the cache."""
        peers = self.runner.peers
        if peers is None:
            return self._run(batch)
        return peers.run(self.kind, batch, lambda: self._run(batch))

    def _run(self, batch: Batch) -> Array:
        program = self.runner.program(self.kind if batch.given is None else Pass.IMAGES)
        return self.runner.run(batch) if program is None else program.run(batch, self.runner.storage)

    def launch(self, plan: StepPlan, readout: Readout, slots: SlotState, with_states: bool = False) -> Launched:
        """Queue the pass of a plan, and its sampling unless that is a late one."""
        batch = slots.lay_out(plan, readout)
        reads_images = self.runner.images is not None and has_images(plan)
        staged, states = None, None
        if reads_images and self.runner.images is not None:
            staged = self.runner.images.place(plan, slots.stage(plan, batch), self.runner.weights)
        logits = slots.run_on_device(plan, batch, None if staged is None else staged.given)
        if logits is not None and with_states:
            states = slots.states_on_device(batch)
        if logits is None:
            staged = slots.stage(plan, batch) if staged is None else staged
            if with_states:
                staged = self.runner.with_taps(staged)
            logits, states = self.run(staged), staged.taps
        return self._launched(logits, plan, readout, slots, states)

    def _launched(
        self, logits: Array, plan: StepPlan, readout: Readout, slots: SlotState, states: Array | None = None
    ) -> Launched:
        """Queue the draw of a pass, unless it is a late one."""
        launched = Launched(None, None if readout.is_plain else logits, states, logits)
        if not slots.draws_late(plan):
            launched.draw(readout, slots)
        return launched

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
            batch = append_batch(kv_caches, tokens, self.phase, self.runner.weights.config)
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
        _choose_rope(kv_cache, len(tokens), self.runner.weights.config)
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

    def launch(self, plan: StepPlan, readout: Readout, slots: SlotState, with_states: bool = False) -> Launched:
        """Queue a decode step: a CUDA graph replay on a device that keeps the slots, else a plain pass."""
        if plan.is_verified:
            return Launched(slots.verify(plan), None)
        on_device = None if with_states else slots.decodes_on_device(plan)  # a graph gives out no hidden states
        if on_device is None or slots.device is None:
            return super().launch(plan, readout, slots, with_states)
        if readout.is_plain:
            draws = slots.draw_with_pass(plan, on_device)
            if draws is not None:
                return Launched(draws, None)
        return self._launched(slots.logits_on_device(plan, on_device), plan, readout, slots)

    def step(self, kv_cache: KvCacheEntry, token: int) -> int:
        """Append the newest token and return the most likely next one; raises if the network gave no finite logit."""
        logits = self.runner.kernels.to_host(self.logits(kv_cache, token))
        best = int(greedy_tokens(logits[None])[0])
        if best == NOTHING:
            raise no_token_error(logits)
        return best

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
    config: ModelConfig,
) -> HostBatch:
    """Reserve new tokens at the end of each sequence and lay out their pass, with the last tokens' logits."""
    runs: list[Run] = []
    for number, (entry, new) in enumerate(zip(kv_caches, tokens, strict=True)):
        ids = np.asarray(new)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TokenIdError("tokens must be one list of whole numbers")
        if not len(ids):
            raise EmptyPromptError("a pass needs at least one token of each sequence")
        if not 0 <= ids.min() <= ids.max() < config.vocab_size:
            raise TokenIdError(f"a token id is outside the vocabulary of {config.vocab_size} tokens")
        _choose_rope(entry, len(ids), config)
        runs.append(Run(number, entry.seq_len, ids.astype(np.int32), entry.rope or 0))
    states = [state for entry, run in zip(kv_caches, runs, strict=True) for state in entry.reserve(len(run.tokens))]
    tables = padded([entry.block_ids for entry in kv_caches])
    last = np.cumsum([len(run.tokens) for run in runs]) - 1
    decodes, prefills = (runs, []) if phase is AttentionPhase.DECODE else ([], runs)
    return HostBatch.from_runs(
        decodes, prefills, tables, kv_caches[0].storage.block_size, last.tolist(), states or None
    )


def _choose_rope(entry: KvCacheEntry, num_tokens: int, config: ModelConfig) -> None:
    """Choose the frequencies of an empty sequence by the tokens it has room for, or by those of its first pass."""
    if entry.rope is None:
        entry.rope = rope_of_length(config, max(num_tokens, entry.capacity))
