# mypy: disallow-untyped-decorators=False
"""From logits to tokens on the device: the largest, or a draw from the distribution, filtered or not.

The vocabulary of a row is cut into chunks. Greedy takes the best of each chunk, then the best of those. A draw sums the
weights of each chunk, finds the chunk that the noise falls into, and then the token inside it, in the order of ids.
Filters (`kernels.triton.filters`) decide between the two which tokens count. Weights are the integers of
`kernels.weights` and noise is a function of (seed, position), so tokens equal those that the host would draw.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.filters import GROUP, LIST, draw_filtered
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.weights import EXACT, highest_of, load_logits, target_of, weights_of

CHUNK = 4096  # logits that one program reads
Mode = Literal["greedy", "draw", "filter"]  # of a batch: the largest logits, draws without filters, any draws


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
    do_not_specialize_on_alignment=["rows", "lengths", "last_tokens", "warmths", "seeds", "chosen"],
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
    turn: tl.tensor,  # i32[1]
    chosen: tl.tensor,  # i32[turns, r]  -1 where nothing can be chosen
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_rows: tl.tensor,
    DRAWS: tl.constexpr,  # some row has a temperature
    FILTERED: tl.constexpr,  # rows with a temperature are drawn already
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


def choose_tokens(
    logits: torch.Tensor,  # f32[r, vocab]
    rows: torch.Tensor,  # i32[r]  slot of each row; -1: padding
    state: DeviceState,
    turn: torch.Tensor,  # i32[1]
    chosen: torch.Tensor,  # i32[turns, r]  its row `turn` is written
    mode: Mode,
    chunk: int = CHUNK,
    list_size: int = LIST,
) -> None:
    """Choose a token for every row, and advance its slot by it."""
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, chunk)
    group = GROUP if mode == "filter" else 0
    best_value = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    best_index = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    best_of_groups = torch.empty((num_rows, num_chunks * (chunk // GROUP)), dtype=torch.float32, device=logits.device)
    sums = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=logits.device)
    drawn = best_index  # not read
    chunks = triton.next_power_of_2(num_chunks)
    _best_of_chunks_kernel[(num_chunks, num_rows)](
        logits, best_value, best_index, best_of_groups, vocab, num_chunks, CHUNK=chunk, GROUP=group, num_warps=4,
        **OVERLAPPED,
    )  # fmt: skip
    if mode == "draw":
        _chunk_sums_kernel[(num_chunks, num_rows)](
            logits, best_value, rows, state.warmths, sums, vocab, num_chunks, CHUNK=chunk, CHUNKS=chunks,
            num_warps=4, **EXACT,
        )  # fmt: skip
    elif mode == "filter":
        drawn = draw_filtered(logits, best_value, best_of_groups, rows, state, chunk, list_size)
    _choose_kernel[(num_rows,)](
        logits, best_value, best_index, sums, drawn, rows, state.lengths, state.tokens, state.warmths, state.seeds,
        turn, chosen, vocab, num_chunks, num_rows,
        DRAWS=mode != "greedy", FILTERED=mode == "filter", CHUNK=chunk, CHUNKS=chunks, num_warps=8, **EXACT,
    )  # fmt: skip
