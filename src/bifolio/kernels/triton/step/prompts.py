# mypy: disallow-untyped-decorators=False
"""Steps with prompts or drafts: a pass for a few numbers of tokens, so that a step is one launch.

    tokens  |<- decodes, one token each ->|<--- prompt 0 --->|<- prompt 1 ->|<- padding ->|

Launched kernel by kernel, a step of some hundred tokens takes the host longer than the device. The inputs of a captured
step are one array of words that the host sends. Decodes read their contexts in pieces (`split_kv`), prompts by tiles of
queries (`prefill`); recurrent layers read a plan of fixed size (`scan_plan`); unused pieces, tiles and chunks end at
once. Decodes with drafts are laid out like chunks of prompts. The pass ends with the hidden states: the number of
tokens whose logits are read varies, so the output layer is launched after it. The states that a draft head reads
(`Batch.taps`) stay on the device until the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from bifolio.errors import PhaseError
from bifolio.kernels.interface import (
    Array,
    AttentionPhase,
    AttentionSegment,
    AttentionShape,
    Batch,
    SplitNetwork,
    Storage,
)
from bifolio.kernels.triton.adapter_slots import AdapterSlots, Layout, StagedAdapters
from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.graphs.graph_cache import CapturedPass, GraphCache
from bifolio.kernels.triton.graphs.sizes import Sizes, padded
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.kernels.triton.query_tiles import QueryTiles, tiles_of
from bifolio.kernels.triton.scan_plan import PlanSizes, StagedStates
from bifolio.kernels.triton.split_kv import Pieces
from bifolio.kernels.triton.step.decodes import GraphKernels


class PromptKey(NamedTuple):
    """A step with prompts."""

    pool: str  # of the model or of a draft head
    size: int  # tokens
    adapts: Layout | None = None  # of the adapters that it serves; None: tokens have none
    reads_rows: bool = False  # `Batch.given`


class PromptPass(CapturedPass):
    """The step of one number of tokens; its inputs are views of `words`."""

    def __init__(self, steps: Prompts, key: PromptKey) -> None:
        sizes, size, device = steps.sizes, key.size, steps.state.device
        most, segment, attention = sizes.max_prompts, steps.segment(size), steps.kernels.attention
        self.reads_rows = key.reads_rows
        self._steps, num_decodes = steps, min(size, steps.state.num_slots)
        self.plan: PlanSizes | None = None  # of recurrent layers
        if steps.storage.layout.num_states:
            self.plan = PlanSizes.of(size, num_decodes + most, most, chunked=not steps.kernels.deterministic)
        rows_of_tiles = sorted(
            {attention.rows_of_tile(shape, segment, steps.kernels.dtype, steps.storage) for shape in steps.shapes}
        )
        parts = [size, size, size, size, num_decodes, num_decodes, most + 2, most + 1, most + 1]
        for rows in rows_of_tiles:
            parts += [sizes.most_tiles(size, rows)] * 2
        parts.append(0 if self.plan is None else sum(self.plan.parts))
        self.words = torch.zeros(sum(parts), dtype=torch.int32, device=device)
        found = torch.split(self.words, parts)
        self.token_ids, self.positions = found[:2]  # i32[t]  -1: the newest token of the slot; as of `Batch`
        self.slots = found[2].fill_(-1)  # i32[t]  slot of each token; -1: padding
        self.places = found[3]  # i32[t]  cache index of K and V; padding: in the padding block
        self.contexts, self.table_rows = found[4:6]  # i32[d]  of decodes, 0: none; slots of decodes
        (starts, lengths, owners), tiles, planned = found[6:9], found[9:-1], found[-1]
        self.tiles = {  # by their rows; the sequence after the last prompt is empty
            rows: QueryTiles(sequence, first, starts, lengths, owners)
            for rows, sequence, first in zip(rows_of_tiles, tiles[::2], tiles[1::2], strict=True)
        }
        self.known_ids = torch.zeros_like(self.token_ids)  # i32[t]  token ids, newest tokens included
        self.index = torch.zeros(size, dtype=torch.int64, device=device)  # i64[t]  cache index of K and V
        self.states: StagedStates | None = None  # of recurrent layers, at the end of `words`
        if self.plan is not None:
            self.states = StagedStates.of_words(planned, self.plan)
            self.states.writes.fill_(-1)
        self.adapters: StagedAdapters | None = None  # of the tokens, whose words follow the others; None: none
        if key.adapts is not None and steps.adapters is not None:
            self.adapters = steps.adapters.staged(size)

    def run(self) -> None:
        self._steps.run(self)


@dataclass(slots=True)
class Prompts:
    """Launches steps with prompts on the state of the slots."""

    kernels: GraphKernels
    split: SplitNetwork
    shapes: tuple[AttentionShape, ...]  # of the attention layers
    decode_segment: Callable[[int], AttentionSegment]  # of one query per sequence, by number of sequences
    storage: Storage
    state: DeviceState
    cache: GraphCache
    sizes: Sizes
    pool: str = "steps"
    adapters: AdapterSlots | None = None
    _pieces: dict[int, dict[int, Pieces]] = field(default_factory=dict)  # by number of decodes; the steps take turns
    _hidden: torch.Tensor | None = None  # [tokens of the largest step, d]
    _taps: torch.Tensor | None = None  # f32[tokens of the largest step, width]
    _given: torch.Tensor | None = None  # f32[tokens of the largest step, width]

    def logits(self, batch: Batch, slots: np.ndarray) -> Array | None:
        """f32[r, vocab]; None if no captured step fits the batch. Does not wait for anything launched before."""
        rows = self.hidden_rows(batch, slots)
        return None if rows is None else self.split.logits(self.kernels, rows)

    def hidden_rows(self, batch: Batch, slots: np.ndarray) -> torch.Tensor | None:
        """[r, d]: hidden states of the tokens whose logits are read; None if no captured step fits the batch."""
        if not fits(self.sizes, batch):
            return None
        size, own = padded(self.sizes.tokens, batch.num_tokens), self.adapters
        numbers = None if batch.adapters is None or own is None else own.numbers_of_rows(batch.adapters)
        adapts = None if numbers is None or own is None else own.layout
        step = self._step(size, adapts, reads_rows=batch.given is not None)
        words = words_of(self.sizes, step, batch, slots)
        groups = np.zeros(0, np.int32) if numbers is None or own is None else own.words(numbers, size)
        rows = np.arange(batch.num_tokens) if batch.logit_rows is None else batch.logit_rows
        sent = self.state.send_words(np.concatenate([words, groups, rows]).astype(np.int32))
        step.words.copy_(sent[: len(words)])
        if step.adapters is not None:
            step.adapters.put(sent[len(words) : len(words) + len(groups)])
        if batch.given is not None and self._given is not None:
            self._given[: batch.num_tokens] = batch.given
        step.launch()
        return tensor(self.kernels.take(self._hidden, sent[len(words) + len(groups) :]))

    def states(self, count: int) -> torch.Tensor:
        """f32[count, width]: a copy of the states that the last step returned for its first tokens."""
        if self._taps is None:
            raise PhaseError("no step has returned states: the network has no taps, or no step has run")
        return self._taps[:count].clone()

    def capture_all(self, layout: Layout | None = None) -> None:
        """Capture all sizes now, the largest first. `layout`: of the adapters that the steps serve."""
        for size in reversed(self.sizes.tokens):
            self._step(size, layout, reads_rows=self.split.given_width > 0)
            if self.split.rows_width:
                self._step(size, layout, reads_rows=True)

    def _step(self, size: int, layout: Layout | None, *, reads_rows: bool) -> PromptPass:
        if self._given is None and reads_rows:
            shape = self.sizes.tokens[-1], self.split.given_width or self.split.rows_width
            self._given = torch.zeros(shape, dtype=torch.float32, device=self.state.device)
        key = PromptKey(self.pool, size, layout, reads_rows)
        return self.cache.find(key, lambda: PromptPass(self, key), self.pool)

    def segment(self, size: int) -> AttentionSegment:
        """The prompts of a step, among all of its tokens."""
        segment = replace(self.split.prompt_segment(size), fresh=False, block_tables=self.state.tables)
        return replace(segment, max_context_len=self._max_context_len)

    @property
    def _max_context_len(self) -> int:
        return self.state.max_blocks * self.storage.block_size

    def run(self, step: PromptPass) -> None:
        size, num_decodes = len(step.token_ids), len(step.contexts)
        begin_prompts(step, self.state)
        decodes = replace(
            self.decode_segment(num_decodes),
            block_tables=self.state.tables,
            context_lens=step.contexts,
            max_context_len=self._max_context_len,
        )
        prompts = self.segment(size)
        pieces = self._pieces.setdefault(num_decodes, {})
        shapes = tuple({shape.reach: shape for shape in self.shapes}.values())
        self.kernels.attention.stage_decode(decodes, step.table_rows, pieces, shapes, self.storage)
        self.kernels.attention.stage_prompts(prompts, step.tiles, step.positions)
        if step.states is not None:
            self.kernels.stage_states(step.states)
        use = None if step.states is None else step.states.use
        if self._taps is None and self.split.tap_width:
            shape = self.sizes.tokens[-1], self.split.tap_width
            self._taps = torch.zeros(shape, dtype=torch.float32, device=self.state.device)
        taps = None if self._taps is None else self._taps[:size]
        given = None if self._given is None or not step.reads_rows else self._given[:size]
        batch = Batch(
            step.known_ids, step.positions, step.index, (decodes, prompts), None, states=use, given=given, taps=taps,
            adapters=None if step.adapters is None else step.adapters.use,
        )  # fmt: skip
        hidden = tensor(self.split.hidden(self.kernels, batch, self.storage))
        if self._hidden is None:
            self._hidden = hidden.new_empty((self.sizes.tokens[-1], hidden.shape[1]))
        self._hidden[:size].copy_(hidden)


def fits(sizes: Sizes, batch: Batch) -> bool:
    """Whether a captured step can run the batch: any decodes of one token each, then a few longer causal sequences."""
    longer = batch.segments[int(has_decodes(batch)) :]
    return (
        batch.num_tokens <= sizes.tokens[-1]
        and sum(segment.num_sequences for segment in longer) <= sizes.max_prompts
        and all(segment.causal for segment in longer)
    )


def has_decodes(batch: Batch) -> bool:
    """Whether the first segment has decodes of one token each; decodes with drafts run as prompts do."""
    first = batch.segments[0]
    return first.phase is AttentionPhase.DECODE and first.max_query_len == 1


def words_of(sizes: Sizes, step: PromptPass, batch: Batch, slots: np.ndarray) -> np.ndarray:
    """i32: the contents of `step.words` for a batch whose sequences hold these slots."""
    border = int(has_decodes(batch))
    decodes, longer = batch.segments[:border], batch.segments[border:]
    count, size = decodes[0].num_sequences if decodes else 0, len(step.token_ids)
    none = np.zeros(0, dtype=np.int32)
    lengths = np.concatenate([none, *(np.diff(segment.query_starts) for segment in longer)])
    tokens = np.zeros((4, size), dtype=np.int32)
    tokens[2] = -1
    tokens[0, : batch.num_tokens], tokens[1, : batch.num_tokens] = batch.token_ids, batch.positions
    tokens[2, :count] = slots[:count]
    tokens[2, count : batch.num_tokens] = np.repeat(slots[count:], lengths)
    tokens[3, : batch.num_tokens] = np.asarray(batch.cache_index)
    own = np.zeros((2, len(step.contexts)), dtype=np.int32)
    for segment in decodes:
        own[:, :count] = segment.context_lens, slots[:count]
    starts = np.full(sizes.max_prompts + 2, batch.num_tokens)
    starts[: len(lengths)] = count + np.cumsum(lengths) - lengths
    contexts, owners = np.zeros((2, sizes.max_prompts + 1), dtype=np.int32)
    contexts[: len(lengths)] = np.concatenate([none, *(segment.context_lens for segment in longer)])
    owners[: len(lengths)] = slots[count:]
    parts = [tokens.reshape(-1), own.reshape(-1), starts, contexts, owners]
    for rows in step.tiles:
        parts += tiles_of(lengths, rows, sizes.most_tiles(size, rows), sizes.max_prompts)
    if step.plan is not None and batch.states is not None:
        parts.append(step.plan.words(batch.states))
    return np.concatenate(parts).astype(np.int32)


@triton.jit(
    do_not_specialize=["num_tokens"],
    do_not_specialize_on_alignment=["token_ids", "slots", "places", "newest", "known_ids", "index"],
)
def _begin_prompts_kernel(
    token_ids: tl.tensor,  # i32[t]
    slots: tl.tensor,  # i32[t]
    places: tl.tensor,  # i32[t]
    newest: tl.tensor,  # i32[slots]
    known_ids: tl.tensor,  # i32[t]
    index: tl.tensor,  # i64[t]
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_tokens
    slot = tl.load(slots + row, mask=exists, other=-1)
    real = slot >= 0
    token = tl.load(token_ids + row, mask=real, other=0)
    token = tl.where(token < 0, tl.load(newest + slot, mask=real & (token < 0), other=0), token)
    tl.store(known_ids + row, tl.maximum(token, 0), mask=exists)  # -1: no token could be chosen; the row is given up
    tl.store(index + row, tl.load(places + row, mask=real, other=0).to(tl.int64), mask=exists)


def begin_prompts(step: PromptPass, state: DeviceState) -> None:
    """Fill in newest tokens, and the place of each token's K and V; those of padding lie in the padding block."""
    num_tokens, block = len(step.token_ids), 128
    _begin_prompts_kernel[(triton.cdiv(num_tokens, block),)](
        step.token_ids, step.slots, step.places, state.tokens, step.known_ids, step.index, num_tokens, BLOCK=block,
        num_warps=4,
    )  # fmt: skip
