# mypy: disallow-untyped-decorators=False
"""Drafts of a head: a pass over hidden states of the target, then the whole chain of drafts in one launch.

    first    tokens and states of each sequence, up to the newest       -> hidden state of its last token
    chain    draw a draft token, run the head on it and on its own hidden state, draw the next, ...

The first pass reads states that the host has kept (`draft`), or those of a verification that was just launched, up to
the tokens that the device has accepted (`follow`): then the host waits for neither. Slots of the batch are slots of a
state of their own (`DeviceState`): block tables that begin with the head's context, and copies of the sampling
parameters. Drafts stay on the device, where the next verification reads them, and reach the host with its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from bifolio.errors import PhaseError
from bifolio.kernels.interface import AttentionSegment, Batch, DraftNetwork, SplitNetwork, Storage
from bifolio.kernels.triton.device_state import DeviceState, begin_step
from bifolio.kernels.triton.graphs.graph_cache import CapturedPass, GraphCache
from bifolio.kernels.triton.graphs.results import TURNS, PendingDrafts, Ring
from bifolio.kernels.triton.graphs.sizes import HEAD_PROMPTS, INTERPRETED_HEAD, SEQUENCES, padded, sequence_sizes
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.kernels.triton.sampling import Mode, choose_tokens
from bifolio.kernels.triton.step.decodes import GraphKernels
from bifolio.kernels.triton.step.prompts import Prompts
from bifolio.kernels.triton.step.verifications import MOST_DRAFTS, MOST_ROWS, Verifications

POOL = "head"  # of graphs: states and tokens of a verification are read after the head's passes, too


class ChainKey(NamedTuple):
    """A chain of drafts."""

    size: int  # sequences
    length: int  # drafts
    mode: Mode


class FirstKey(NamedTuple):
    """The head's pass over the states of a verification."""

    size: int  # sequences
    width: int  # tokens of each


class ChainPass(CapturedPass):
    """The chain of a key; its rows and the hidden states before the first draft are those of all chains."""

    def __init__(self, steps: HeadSteps, key: ChainKey) -> None:
        device = steps.state.device

        def integers(dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(key.size, dtype=dtype, device=device)

        self._steps, self.mode = steps, key.mode
        self.rows, self.hidden = steps.rows[: key.size], steps.hidden[: key.size]
        # Token ids, positions, index, contexts, table rows of a pass.
        self.layout = integers(), integers(), integers(torch.int64), integers(), integers()
        self.rings = [Ring(key.size, key.mode, device) for _ in range(key.length)]
        self.pieces: dict[int, Any] = {}

    def run(self) -> None:
        self._steps.run_chain(self)

    def recorded(self) -> None:
        for ring in self.rings:
            ring.restart()

    def drafts(self, count: int) -> PendingDrafts:
        """The drafts of the launch that was just made."""
        turns = [ring.take() for ring in self.rings]
        return PendingDrafts(self.rings, turns[0], count, self.event())


class FirstPass(CapturedPass):
    """The head's pass over the states of a verification."""

    def __init__(self, steps: HeadSteps, key: FirstKey) -> None:
        self._steps, self.key = steps, key
        self.pieces: dict[int, Any] = {}

    def run(self) -> None:
        self._steps.run_first(self)


class HeadSteps:
    """Launches the passes of a head."""

    def __init__(
        self,
        kernels: GraphKernels,
        network: DraftNetwork,
        storage: Storage,
        source: DeviceState,
        vocab_size: int,
        mode_of: Callable[[np.ndarray], Mode],  # of draws for slots
        verify: Verifications,
        cache: GraphCache,
    ) -> None:
        self._kernels, self._network, self._storage, self._source = kernels, network, storage, source
        self._vocab_size, self._mode_of, self._verify, self._cache = vocab_size, mode_of, verify, cache
        device, sizes = source.device, HEAD_PROMPTS if source.on_gpu else INTERPRETED_HEAD
        self.state = DeviceState(source.num_slots, source.max_blocks, device)
        self._tables = np.zeros((source.num_slots, source.max_blocks), np.int32)  # as they were sent
        split = SplitNetwork(
            network.from_target, network.logits, network.prompt_segment, given_width=network.given_width
        )
        self._passes = Prompts(
            kernels, split, (network.shape,), network.decode_segment, storage, self.state, cache, sizes, POOL
        )
        ids = network.token_ids
        self._ids = None if ids is None else torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(device)

        def integers(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self._entries = integers(source.num_slots)  # of each slot's head
        self._starts = integers(source.num_slots)  # position of the first entry of its context
        self.rows = integers(SEQUENCES[-1])  # slots of the chain; -1: padding
        self.hidden = torch.zeros((SEQUENCES[-1], network.hidden_size), dtype=torch.float32, device=device)
        self._layout = (*(integers(MOST_ROWS) for _ in range(4)), integers(MOST_ROWS, torch.int64))  # of first passes

    def draft(
        self,
        batch: Batch,  # of the first pass, on the host; its hidden states are `given`
        tables: np.ndarray,  # i32[n, blocks]  of the slots; 0: no block
        slots: np.ndarray,  # i32[n]
        positions: np.ndarray,  # i64[n]  of the first draft tokens
        entries: np.ndarray,  # i64[n]  of the head, before the first pass of the chain
        length: int,
    ) -> PendingDrafts | None:
        """Draft `length` tokens for each slot; None if there are too many slots or tokens."""
        count = len(slots)
        if count > min(SEQUENCES[-1], self.state.num_slots) or length > MOST_DRAFTS:
            return None
        self._set_tables(slots, tables)
        hidden = self._passes.hidden_rows(batch, slots)
        if hidden is None:
            return None
        chain = self._chain(ChainKey(self._size(count), length, self._draw_mode(slots)))
        words = np.full((4, len(chain.rows)), -1)
        words[:, :count] = slots, positions - 1, entries, positions - 1 - entries
        sent = self._source.send_words(words.astype(np.int32).reshape(-1)).view(4, -1)
        self._copy_sampling()
        chain.rows.copy_(sent[0])
        _set_kernel[(count,)](sent, self.state.lengths, self._entries, self._starts, len(chain.rows), num_warps=1)
        chain.hidden[:count] = hidden
        chain.launch()
        return chain.drafts(count)

    def read(self, batch: Batch, tables: np.ndarray, slots: np.ndarray) -> bool:
        """Write the head's entries of tokens without drafting; False if there are too many."""
        self._set_tables(slots, tables)
        return self._passes.hidden_rows(batch, slots) is not None

    def follow(self, slots: np.ndarray, tables: np.ndarray, length: int) -> PendingDrafts:
        """Draft `length` tokens after those that the last verification accepts, which has these slots (i32[n]).

        `tables` as for `draft`, with the same first blocks as in the last call for each slot.
        """
        key = self._verify.last
        if key is None:
            raise PhaseError("no verification was launched: call `DeviceSlots.verify` first")
        first = self._first(FirstKey(key.size, key.width))
        chain = self._chain(ChainKey(key.size, length, self._draw_mode(slots)))
        self._set_tables(slots, tables)
        self.state.send()
        first.launch()
        chain.launch()
        return chain.drafts(len(slots))

    def warm_up(self, longest: int) -> None:
        """Capture all steps of greedy drafts and of those drawn with filters now."""
        self._passes.capture_all()
        modes, lengths = (Mode(), Mode("filter")), sorted({1, min(2, longest), longest}, reverse=True)
        self._verify.capture_all(lengths, modes)
        for size in reversed(sequence_sizes(self.state.num_slots)):
            for length in range(longest, 0, -1):
                for mode in modes:
                    self._chain(ChainKey(size, length, mode))
            for length in lengths:
                if size * (length + 1) <= MOST_ROWS:
                    self._first(FirstKey(size, length + 1))

    def _draw_mode(self, slots: np.ndarray) -> Mode:
        return self._mode_of(slots)._replace(logprobs=False)

    def _set_tables(self, slots: np.ndarray, tables: np.ndarray) -> None:
        """Set the changed blocks of slots; blocks after those of `tables` become padding."""
        width = tables.shape[1]
        for slot, table in zip(slots.tolist(), tables, strict=True):
            known = self._tables[slot]
            changed = np.flatnonzero(known[:width] != table)
            if known[width:].any():
                changed = np.append(changed, width + np.flatnonzero(known[width:]))
            if len(changed):
                first, end = int(changed[0]), int(changed[-1]) + 1
                known[: min(end, width)] = table[: min(end, width)]
                known[width:] = 0
                self.state.set_blocks(slot, first, known[first:end])

    def _copy_sampling(self) -> None:
        """Let all slots sample like those of the batch; lengths are copied, too."""
        for theirs, own in zip(self._source.columns, self.state.columns, strict=True):
            own.copy_(theirs)

    def _size(self, count: int) -> int:
        return padded(SEQUENCES, count) if self.state.on_gpu else count

    def _segment(self, count: int, contexts: torch.Tensor) -> AttentionSegment:
        return replace(
            self._network.decode_segment(count),
            block_tables=self.state.tables,
            context_lens=contexts,
            max_context_len=self.state.max_blocks * self._storage.block_size,
        )

    # -- the first pass after a verification ---------------------------------------------------------------------------
    def _first(self, key: FirstKey) -> FirstPass:
        return self._cache.find(key, lambda: FirstPass(self, key), POOL)

    def run_first(self, first: FirstPass) -> None:
        """Run the head on all tokens of the verification, and keep the hidden states of the last accepted ones.

        Entries of tokens that were not accepted are written anew with the tokens that take their places.
        """
        inputs, (size, width) = self._verify.inputs, first.key
        count, block = size * width, 64
        self._copy_sampling()
        torch.sub(self._source.lengths, self._starts, out=self._entries).clamp_(min=0)
        tokens, positions, contexts, table_rows, index = (part[:count] for part in self._layout)
        _begin_first_kernel[(triton.cdiv(count, block),)](
            inputs.rows(count), self._verify.sampled.tokens, inputs.places, self._starts, self.state.ropes,
            self.state.tables, tokens, positions, index, contexts, table_rows, count, self.state.tables.stride(0),
            BLOCK_SIZE=self._storage.block_size, BLOCK=block, num_warps=1,
        )  # fmt: skip
        segment = self._segment(count, contexts)
        self._kernels.attention.stage_decode(segment, table_rows, first.pieces, (self._network.shape,), self._storage)
        given = None if inputs.taps is None else inputs.taps[:count] * self._network.state_scale
        batch = Batch(tokens, positions, index, (segment,), None, given=given)
        hidden = tensor(self._network.from_target(self._kernels, batch, self._storage))
        self.hidden[:size].copy_(hidden.index_select(0, inputs.last[:size]))
        self.rows[:size].copy_(inputs.rows(count).view(size, width)[:, 0])

    # -- the chain -----------------------------------------------------------------------------------------------------
    def _chain(self, key: ChainKey) -> ChainPass:
        return self._cache.find(key, lambda: self._new_chain(key), POOL)

    def _new_chain(self, key: ChainKey) -> ChainPass:
        """A chain whose rows are padding, since recording runs it."""
        self.rows.fill_(-1)
        return ChainPass(self, key)

    def run_chain(self, chain: ChainPass) -> None:
        hidden: Any = chain.hidden
        for number, ring in enumerate(chain.rings):
            self._begin(chain, ring.turn)
            if number:
                hidden = self._pass(chain, hidden)
                self._entries.add_(1)
            logits = self._whole(tensor(self._network.logits(self._kernels, hidden)))
            choose_tokens(logits, chain.rows, self.state, ring.turn, ring.results, chain.mode)
            _keep_kernel[(len(chain.rows),)](
                chain.rows, self.state.tokens, self._verify.drafts, number, MOST=MOST_DRAFTS, num_warps=1
            )

    def _begin(self, chain: ChainPass, turn: torch.Tensor) -> None:
        """Lay out the newest draft token of every row, at its place in the head's context."""
        tokens, positions, index, contexts, table_rows = chain.layout
        begin_step(
            chain.rows, self.state.tables, self._entries, self.state.ropes, self.state.tokens, tokens, positions,
            index, contexts, table_rows, turn, self._storage.block_size, TURNS,
        )  # fmt: skip

    def _pass(self, chain: ChainPass, hidden: Any) -> torch.Tensor:
        """The head on its own hidden states: [r, d]"""
        tokens, positions, index, contexts, table_rows = chain.layout
        segment = self._segment(len(chain.rows), contexts)
        self._kernels.attention.stage_decode(segment, table_rows, chain.pieces, (self._network.shape,), self._storage)
        batch = Batch(tokens, positions, index, (segment,), None, given=hidden)
        return tensor(self._network.from_own(self._kernels, batch, self._storage))

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """f32[r, vocab of the target]: tokens that the head does not know are excluded."""
        if self._ids is None:
            return logits
        shape = logits.shape[0], self._vocab_size
        whole = torch.full(shape, float("-inf"), dtype=torch.float32, device=logits.device)
        return whole.index_copy_(1, self._ids, logits.float())


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["sent"])
def _set_kernel(
    sent: tl.tensor,  # i32[4, r]  slots, lengths, entries, starts
    lengths: tl.tensor,  # i32[slots]
    entries: tl.tensor,  # i32[slots]
    starts: tl.tensor,  # i32[slots]
    num_rows: tl.tensor,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(sent + row)
    tl.store(lengths + slot, tl.load(sent + num_rows + row))
    tl.store(entries + slot, tl.load(sent + 2 * num_rows + row))
    tl.store(starts + slot, tl.load(sent + 3 * num_rows + row))


@triton.jit(do_not_specialize=["number"], do_not_specialize_on_alignment=["rows", "tokens", "drafts"])
def _keep_kernel(
    rows: tl.tensor,  # i32[r]  slots; -1: padding
    tokens: tl.tensor,  # i32[slots]  the newest drafts
    drafts: tl.tensor,  # i32[slots, MOST]
    number: tl.tensor,
    MOST: tl.constexpr,
) -> None:
    slot = tl.load(rows + tl.program_id(0))
    if slot >= 0:  # a row that cannot be sampled drafts token 0
        tl.store(drafts + slot.to(tl.int64) * MOST + number, tl.maximum(tl.load(tokens + slot), 0))


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["rows", "sampled", "starts", "ropes", "tables"],
)
def _begin_first_kernel(
    rows: tl.tensor,  # i32[r]  slot of each token; -1: padding
    sampled: tl.tensor,  # i32[r]  token after each
    places: tl.tensor,  # i32[r]  position of each
    starts: tl.tensor,  # i32[slots]
    ropes: tl.tensor,  # i32[slots]
    tables: tl.tensor,  # i32[slots, max_blocks]  from the start on
    token_ids: tl.tensor,  # i32[r]
    positions: tl.tensor,  # i32[r]
    index: tl.tensor,  # i64[r]
    contexts: tl.tensor,  # i32[r]
    table_rows: tl.tensor,  # i32[r]
    num_rows: tl.tensor,
    table_stride: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    slot = tl.load(rows + row, mask=exists, other=-1)
    real = slot >= 0
    position = tl.load(places + row, mask=real, other=0) - tl.load(starts + slot, mask=real, other=0)
    position = tl.maximum(position, 0)  # of slots whose context the head has not read
    token = tl.load(sampled + row, mask=real, other=0)
    block = tl.load(tables + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE, mask=real, other=0)
    tl.store(token_ids + row, tl.maximum(token, 0), mask=exists)
    tl.store(positions + row, position + tl.load(ropes + slot, mask=real, other=0), mask=exists)
    tl.store(index + row, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, mask=exists)
    tl.store(contexts + row, tl.where(real, position + 1, 0), mask=exists)
    tl.store(table_rows + row, tl.maximum(slot, 0), mask=exists)
