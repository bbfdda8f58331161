"""A draft head on a kernel set: its passes, and its keys and values in the blocks of the target's tables.

An entry at position i holds the keys and values that the head computed from the hidden state of position i and the
token at i + 1. Entries may be missing: the head computes none while drafting rests, and blocks found in the prefix
cache may come from such a time. `HeadBlocks` counts the entries of each block, so that a draft reads a context without
holes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from bifolio.config import CacheConfig
from bifolio.engine.host_batch import HostBatch, Run
from bifolio.errors import PhaseError
from bifolio.kernels.interface import (
    Array,
    AttentionPhase,
    AttentionSegment,
    Batch,
    DraftNetwork,
    DraftSlots,
    KernelSet,
    Network,
    PendingDrafts,
    StepProgram,
    Storage,
)
from bifolio.kernels.storage import CacheLayout, KVStorage
from bifolio.model import draft_head
from bifolio.model.draft_head import HeadWeights
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator


class HeadBlocks:
    """The head's storage: a `BlockMover` that counts the leading entries of each block."""

    def __init__(self, storage: KVStorage) -> None:
        self.storage = storage
        self.block_size = storage.block_size
        self.filled = np.zeros(storage.num_blocks, np.int32)  # entries computed from hidden states of the target
        self.is_untouched = True  # no entry was ever computed

    def move_blocks(self, moves: Iterable[tuple[int, int]]) -> None:
        moves = list(moves)
        self.storage.move_blocks(moves)
        sources = [source for source, _ in moves]
        self.filled[[target for _, target in moves]] = self.filled[sources]

    def poison_blocks(self, block_ids: Iterable[int]) -> None:
        block_ids = list(block_ids)
        self.storage.poison_blocks(block_ids)
        self.filled[block_ids] = 0

    def overwritten(self, table: np.ndarray, start: int, end: int) -> None:
        """The target computes the positions [start, end) anew: their entries belong to other tokens."""
        size, filled = self.block_size, self.filled
        block = table[start // size]
        filled[block] = min(filled[block], start % size)
        if (end - 1) // size > start // size:
            filled[table[start // size + 1 : (end - 1) // size + 1]] = 0

    def computed(self, table: np.ndarray, start: int, end: int) -> None:
        """The head computed the entries [start, end)."""
        size, filled = self.block_size, self.filled
        self.is_untouched = False
        for number in range(start // size, (end - 1) // size + 1):
            first, last = max(start - number * size, 0), min(end - number * size, size)
            block = table[number]
            if filled[block] >= first:
                filled[block] = max(filled[block], last)

    def has(self, table: np.ndarray, position: int) -> bool:
        return bool(self.filled[table[position // self.block_size]] > position % self.block_size)

    def context(self, table: np.ndarray, position: int) -> tuple[int, int]:
        """(first entry, end) of a context without holes that ends at most one block before `position`.

        The first entry is at the start of a block.
        """
        if position == 0:
            return 0, 0
        size = self.block_size
        last = (position - 1) // size
        end = last * size + min(int(self.filled[table[last]]), position - last * size)
        holes = np.flatnonzero(self.filled[table[:last]] < size)
        return (int(holes[-1]) + 1 if len(holes) else 0) * size, end


class HeadRun(NamedTuple):
    """Tokens of one sequence that the head reads, with the hidden states before them."""

    table: np.ndarray  # i32[blocks]  of the sequence
    context_start: int  # position of the first entry that is read
    start: int  # position of the first token's entry
    tokens: list[int]
    rope: int = 0  # as of `Run`


class HeadRunner:
    """The weights, programs and storage of a head."""

    def __init__(self, weights: HeadWeights, cache: CacheConfig, kernels: KernelSet) -> None:
        config = weights.config
        layout = CacheLayout(
            1,
            cache.num_blocks,
            cache.block_size,
            config.num_kv_heads,
            config.head_dim,
            cache.dtype,
            cache.poison_free_blocks,
            config.mla is not None,
        )
        self.weights, self.kernels = weights, kernels
        self.blocks = HeadBlocks(kernels.new_storage(layout))
        self._programs: dict[bool, StepProgram | None] = {}
        self.on_device: DraftSlots | None = None  # launches all passes of a step at once
        self._blank = kernels.from_host(np.zeros((1, config.hidden_size), np.float32))

    def run(
        self, runs: list[HeadRun], states: Array, phase: AttentionPhase, *, own_states: bool
    ) -> tuple[Array, Array]:
        """(logits f32[s, draft vocab], hidden states [s, d]) of the last token of each run.

        `states` are the hidden states of all tokens, run after run: the target's, or with `own_states` the head's own.
        """
        ends = np.cumsum([len(run.tokens) for run in runs]) - 1
        hidden = blank_rows(self.kernels, self._blank, int(ends[-1]) + 1)
        batch = replace(self._lay_out(runs, phase, ends.tolist()), given=states, taps=hidden)
        if own_states not in self._programs:
            self._programs[own_states] = self.kernels.record(self._network(own_states), AttentionPhase.DECODE)
        program = self._programs[own_states]
        if program is None:
            logits = draft_head.forward(self.weights, batch, self.kernels, self.blocks.storage, own_states=own_states)
        else:
            logits = program.run(batch, self.blocks.storage)
        return logits, self.kernels.take(hidden, ends) if len(runs) < len(hidden) else hidden

    def draft(
        self, runs: list[HeadRun], states: Array, slots: Sequence[int], positions: Sequence[int], lengths: Sequence[int]
    ) -> PendingDrafts | None:
        """i32[s, n]: drafts behind the last token of each run, drawn on the device; None: it cannot.

        `lengths`: drafts that each sequence has blocks for; n is the largest of them.
        """
        most = max(lengths)
        if self.on_device is None or most > self.most_on_device:
            return None
        ends = np.cumsum([len(run.tokens) for run in runs]) - 1
        entries = np.array([run.start + len(run.tokens) - run.context_start for run in runs])
        tables = self._tables(runs, [count - 1 for count in lengths], most)
        batch = replace(self._host_batch(runs, AttentionPhase.DECODE, ends.tolist(), tables).on_host(), given=states)
        return self.on_device.draft(
            batch, tables, np.asarray(slots, dtype=np.int32), np.asarray(positions), entries, most
        )

    def read(self, run: HeadRun, states: Array, slot: int) -> None:
        """Compute the entries of a run's tokens."""
        if self.on_device is not None:
            tables = self._tables([run], [0], 0)
            batch = self._host_batch([run], AttentionPhase.DECODE, [len(run.tokens) - 1], tables).on_host()
            if self.on_device.read(replace(batch, given=states), tables, np.array([slot], np.int32)):
                return
        self.run([run], states, AttentionPhase.PREFILL, own_states=False)

    @property
    def most_on_device(self) -> int:
        """Draft tokens of a launch: those behind the last token of a model's context fit into one more block."""
        return self.blocks.block_size

    def follow(self, runs: list[HeadRun], slots: Sequence[int], length: int) -> PendingDrafts:
        """i32[s, length]: drafts after the tokens of each run that the device accepts; their values are not known."""
        if self.on_device is None:
            raise PhaseError("this head runs pass by pass: keep the hidden states of the verification")
        tables = self._tables(runs, [0] * len(runs), length)
        return self.on_device.follow(np.asarray(slots, dtype=np.int32), tables, length)

    def _lay_out(self, runs: list[HeadRun], phase: AttentionPhase, logit_rows: list[int]) -> Batch:
        tables = self._tables(runs, [0] * len(runs), 0)
        return self._host_batch(runs, phase, logit_rows, tables).to(self.kernels)

    def _tables(self, runs: list[HeadRun], more: list[int], room: int) -> np.ndarray:
        """i32[s, blocks]: the blocks of each run's context, and of so many tokens `more`; 0 for `room` tokens at least.

        Drafts behind the tokens that a sequence has blocks for are written to the padding block.
        """
        size = self.blocks.block_size
        ends = [run.start + len(run.tokens) for run in runs]
        width = max(-(-(end - run.context_start + room) // size) for run, end in zip(runs, ends, strict=True))
        tables = np.zeros((len(runs), width), np.int32)
        for number, (run, end, count) in enumerate(zip(runs, ends, more, strict=True)):
            own = run.table[run.context_start // size : -(-(end + count) // size)]
            tables[number, : len(own)] = own
        return tables

    def _host_batch(
        self, runs: list[HeadRun], phase: AttentionPhase, logit_rows: list[int], tables: np.ndarray
    ) -> HostBatch:
        """Positions are counted from the first entry that is read: rope depends on differences alone."""
        laid_out = [Run(number, run.start - run.context_start, run.tokens, run.rope) for number, run in enumerate(runs)]
        decodes, prefills = (laid_out, []) if phase is AttentionPhase.DECODE else ([], laid_out)
        return HostBatch.from_runs(decodes, prefills, tables, self.blocks.block_size, logit_rows)

    def _network(self, own_states: bool) -> Network:
        def forward(kernels: KernelSet, batch: Batch, storage: Storage | None) -> Array:
            return draft_head.forward(self.weights, batch, kernels, storage, own_states=own_states)

        return Network(forward, (self.weights.layer.shape,), _decode_segment, self._rotations)

    @property
    def _rotations(self) -> tuple[tuple[Array, float], ...]:
        return tuple(zip(self.weights.inverse_frequencies, self.weights.rope_scales, strict=True))

    @property
    def network(self) -> DraftNetwork:
        """The passes of the head as a device records them."""
        weights = self.weights

        def hidden(kernels: KernelSet, batch: Batch, storage: Storage | None, *, own_states: bool) -> Array:
            return draft_head.hidden_states(weights, batch, kernels, storage, own_states=own_states)

        return DraftNetwork(
            partial(hidden, own_states=False),
            partial(hidden, own_states=True),
            lambda kernels, x: draft_head.read_out(weights, x, kernels),
            weights.layer.shape,
            _decode_segment,
            _prompt_segment,
            self._rotations,
            weights.config.hidden_size,
            weights.states_width,
            weights.state_scale,
            weights.token_ids,
        )


def _decode_segment(count: int) -> AttentionSegment:
    ones = np.ones(count, dtype=np.int32)
    return DecodeOrchestrator.lay_out(ones - 1, ones, None)


def _prompt_segment(count: int) -> AttentionSegment:
    return PrefillOrchestrator.lay_out(np.zeros(1, dtype=np.int32), np.full(1, count, dtype=np.int32), None)


def blank_rows(kernels: KernelSet, blank: Array, count: int) -> Array:
    """A new array of `count` rows like `blank`, f32[1, width], on the kernels' device."""
    if isinstance(blank, np.ndarray):
        return np.empty((count, blank.shape[1]), np.float32)
    return kernels.take(blank, np.zeros(count, np.int32))
