# mypy: disallow-untyped-decorators=False
"""From logits to tokens on the device: the largest, or a draw from the distribution, filtered or not.

The vocabulary of a row is cut into chunks. Greedy takes the best of each chunk, then the best of those. A draw sums the
weights of each chunk, finds the chunk that the noise falls into, and then the token inside it, in the order of ids.
Filters (`kernels.triton.filters`) decide between the two which tokens count. Weights are the integers of
`kernels.weights` and noise is a function of (seed, position), so tokens equal those that the host would draw.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.edits import SlotEdits, edit_logits
from bifolio.kernels.triton.filters import GROUP, LIST, draw_filtered
from bifolio.kernels.triton.logprobs import TOP_LIST, WORDS, score_drawn
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.rare_filters import draw_rare
from bifolio.kernels.triton.weights import EXACT, highest_of, load_logits, target_of, weights_of

CHUNK = 4096  # logits that one program reads
Kind = Literal["greedy", "draw", "filter"]  # of a batch: the largest logits, draws without filters, any draws


class Mode(NamedTuple):
    """The parts of choosing tokens that a batch needs; each mode is a captured step of its own, so there are few."""

    kind: Kind = "greedy"
    edits: bool = False  # only with the kind "filter"
    logprobs: bool = False  # only with the kind "filter"
    rare: bool = False  # typical sampling or XTC; only with the kind "filter"

    @classmethod
    def of(cls, draws: bool, filters: bool, edits: bool, logprobs: bool, rare: bool = False) -> Mode:
        """The mode of a batch of which some slot draws, filters, has edits or logprobs, is typical or has XTC."""
        if filters or edits or logprobs or rare:
            return cls("filter", edits, logprobs, rare)
        return cls("draw" if draws else "greedy")


class Results(NamedTuple):
    """Where tokens go; launches take turns."""

    chosen: torch.Tensor  # i32[turns, r]  in the host's memory
    scores: torch.Tensor | None  # i32[turns, r, WORDS]  in the host's memory; None: no logprobs

    @classmethod
    def new(cls, turns: int, size: int, mode: Mode | None, pinned: bool) -> Results:
        chosen = torch.zeros((turns, size), dtype=torch.int32, pin_memory=pinned)
        scored = mode is not None and mode.logprobs
        shape = turns, size, WORDS
        return cls(chosen, torch.zeros(shape, dtype=torch.int32, pin_memory=pinned) if scored else None)


@triton.jit
def _best_of_chunks_kernel(
    logits: tl.tensor,  # f32[r, vocab]
    best_value: tl.tensor,  # f32[r, chunks]
    best_index: tl.tensor,  # i32[r, chunks]
    best_of_groups: tl.tensor,  # f32[r, chunks * CHUNK / GROUP]
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,  # 0: best_of_groups is not written
) -> None:
    chunk, row = tl.program_id(0), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    wait_for_inputs()
    values = load_logits(logits, row, column, vocab)
    value, index = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_value + row * num_chunks + chunk, value)
    tl.store(best_index + row * num_chunks + chunk, chunk * CHUNK + index)
    if GROUP > 0:
        groups = tl.max(tl.reshape(values, (CHUNK // GROUP, GROUP)), axis=1)
        place = (row * num_chunks + chunk) * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
        tl.store(best_of_groups + place, groups)


@triton.jit(do_not_specialize_on_alignment=["rows", "warmths"])
def _chunk_sums_kernel(
    logits: tl.tensor,
    best_value: tl.tensor,
    rows: tl.tensor,  # i32[r]  slot of each row; -1: padding
    warmths: tl.tensor,  # f32[slots]  1 / temperature; 0: greedy
    sums: tl.tensor,  # i64[r, chunks]
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    chunk, row = tl.program_id(0), tl.program_id(1)
    warmth = tl.load(warmths + tl.maximum(tl.load(rows + row), 0))
    wait_for_inputs()
    if warmth > 0:
        highest = highest_of(best_value, row, num_chunks, CHUNKS)
        values = load_logits(logits, row, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
        tl.store(sums + row * num_chunks + chunk, tl.sum(weights_of(values, highest, warmth), axis=0))


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["rows", "lengths", "last_tokens", "warmths", "seeds", "edit_flags", "chosen"],
)
def _choose_kernel(
    logits: tl.tensor,
    best_value: tl.tensor,  # f32[r, chunks]
    best_index: tl.tensor,  # i32[r, chunks]
    sums: tl.tensor,  # i64[r, chunks]
    drawn: tl.tensor,  # i32[r]  of rows with a temperature, if FILTERED
    rows: tl.tensor,  # i32[r]
    lengths: tl.tensor,  # i32[slots]  tokens in the cache before this step; becomes one more
    last_tokens: tl.tensor,  # i32[slots]  becomes the chosen token
    warmths: tl.tensor,  # f32[slots]  1 / temperature; 0: greedy
    seeds: tl.tensor,  # i64[slots]
    edit_flags: tl.tensor,  # i32[slots]
    counts: tl.tensor,  # i32[slots, vocab]  of slots whose tokens are counted, if EDITED: one more of the chosen token
    turn: tl.tensor,  # i32[1]
    chosen: tl.tensor,  # i32[turns, r]  -1 where nothing can be chosen
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_rows: tl.tensor,
    DRAWS: tl.constexpr,  # some row has a temperature
    FILTERED: tl.constexpr,  # rows with a temperature are drawn already
    EDITED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    wait_for_inputs()
    if slot >= 0:
        every = tl.arange(0, CHUNKS)
        exists = every < num_chunks
        values = tl.load(best_value + row * num_chunks + every, mask=exists, other=-float("inf"))
        highest, where = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(best_index + row * num_chunks + where)
        length = tl.load(lengths + slot)
        if DRAWS:
            warmth = tl.load(warmths + slot)
            if warmth > 0:
                if FILTERED:
                    token = tl.load(drawn + row)
                else:
                    parts = tl.load(sums + row * num_chunks + every, mask=exists, other=0)
                    target = target_of(tl.sum(parts, axis=0), tl.load(seeds + slot), length + 1)
                    running = tl.cumsum(parts, axis=0)
                    chunk = tl.minimum(tl.sum(((running <= target) & exists).to(tl.int32), axis=0), num_chunks - 1)
                    before = tl.sum(tl.where(every < chunk, parts, 0), axis=0)
                    inside = load_logits(logits, row, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
                    lowest = tl.where(highest == -float("inf"), 0.0, highest)
                    reached = tl.cumsum(weights_of(inside, lowest, warmth), axis=0) + before
                    step = tl.sum((reached <= target).to(tl.int32), axis=0)
                    token = tl.minimum(chunk * CHUNK + step, vocab - 1)
        token = tl.where(highest == -float("inf"), -1, token)
        tl.store(chosen + tl.load(turn) * num_rows + row, token)
        tl.store(last_tokens + slot, token)
        tl.store(lengths + slot, length + 1)
        if EDITED:
            is_counted = (tl.load(edit_flags + slot) & 2) != 0
            if is_counted & (token >= 0):
                count = counts + slot.to(tl.int64) * vocab + token
                tl.store(count, tl.load(count) + 1)


class _Best(NamedTuple):
    """The largest logits of chunks and groups."""

    value: torch.Tensor  # f32[r, chunks]
    token: torch.Tensor  # i32[r, chunks]
    of_groups: torch.Tensor  # f32[r, groups]

    @classmethod
    def of(cls, logits: torch.Tensor, chunk: int, group: int) -> _Best:
        """`group`: 0 if the largest of groups are not needed."""
        (num_rows, vocab), device = logits.shape, logits.device
        num_chunks = triton.cdiv(vocab, chunk)
        best = cls(
            torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device),
            torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device),
            torch.empty((num_rows, num_chunks * (chunk // GROUP)), dtype=torch.float32, device=device),
        )
        _best_of_chunks_kernel[(num_chunks, num_rows)](
            logits, *best, vocab, num_chunks, CHUNK=chunk, GROUP=group, num_warps=4, **OVERLAPPED
        )
        return best


def choose_tokens(
    logits: torch.Tensor,  # f32[r, vocab]
    rows: torch.Tensor,  # i32[r]  slot of each row; -1: padding
    state: DeviceState,
    turn: torch.Tensor,  # i32[1]
    results: Results,  # its part `turn` is written
    mode: Mode,
    edits: SlotEdits | None = None,
    chunk: int = CHUNK,
    list_size: int = LIST,
    top_list_size: int = TOP_LIST,
) -> None:
    """Choose a token for every row, and advance its slot by it; edits may change the logits in place."""
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, chunk)
    chunks = triton.next_power_of_2(num_chunks)
    group = GROUP if mode.kind == "filter" else 0
    own_logits, is_edited = logits, mode.edits and edits is not None
    if mode.edits and edits is not None:
        logits = edit_logits(own_logits, rows, state, edits, chunk, in_place=results.scores is None)
    best = _Best.of(logits, chunk, group)
    sums = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=logits.device)
    drawn = best.token  # not read
    if mode.kind == "draw":
        _chunk_sums_kernel[(num_chunks, num_rows)](
            logits, best.value, rows, state.warmths, sums, vocab, num_chunks, CHUNK=chunk, CHUNKS=chunks,
            num_warps=4, **EXACT,
        )  # fmt: skip
    elif mode.kind == "filter":
        drawn = draw_filtered(logits, best.value, best.of_groups, rows, state, chunk, list_size)
        if mode.rare:
            draw_rare(logits, best.value, rows, state, drawn, chunk)
    _choose_kernel[(num_rows,)](
        logits, best.value, best.token, sums, drawn, rows, state.lengths, state.tokens, state.warmths, state.seeds,
        state.edit_flags, best.token if edits is None else edits.counts, turn, results.chosen, vocab, num_chunks,
        num_rows, DRAWS=mode.kind != "greedy", FILTERED=mode.kind == "filter", EDITED=is_edited, CHUNK=chunk,
        CHUNKS=chunks, num_warps=8, **EXACT,
    )  # fmt: skip
    if results.scores is not None:
        best = _Best.of(own_logits, chunk, group) if is_edited else best
        score_drawn(own_logits, best.value, best.of_groups, rows, state, turn, results.scores, chunk, top_list_size)
