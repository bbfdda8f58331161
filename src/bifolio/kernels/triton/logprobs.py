# mypy: disallow-untyped-decorators=False
"""Logprobs of drawn tokens on the device, with ranks and the most likely tokens; no sort of the vocabulary.

    bound    one program per row: of the largest logits of all groups, the one of rank n; n tokens reach it at least
    score    one program per chunk: exact sum of the weights, logits above the token's, tokens that reach the bound
    report   one program per row: the n best of those tokens, in order, and all sums, into the host's memory

The device sends integers and logits, and the host takes the logarithm (`sampling.logprobs.finish_scores`), so that
results equal those of `sampling.logprobs.score_tokens` bit for bit. Logits are the model's own, before any edit.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import TokenScores
from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.filters import kth_largest
from bifolio.kernels.triton.pdl import wait_for_inputs
from bifolio.kernels.triton.selection import key_of, value_of
from bifolio.kernels.triton.weights import EXACT, cleaned, highest_of, load_logits, weights_of

MAX_TOP = 20  # most likely tokens of a row
TOP_LIST = 512  # tokens of a row that reach the bound and have room; if there are more, the whole row is searched
WORDS = 4 + 2 * MAX_TOP  # of a row in the host's memory: total (2), logit, rank, ids, logits


@triton.jit(do_not_specialize=["num_chunks", "num_groups"], do_not_specialize_on_alignment=["rows", "num_scores"])
def _bound_kernel(
    best_value: tl.tensor,  # f32[r, chunks]
    best_of_groups: tl.tensor,  # f32[r, groups]
    rows: tl.tensor,  # i32[r]  slot of each row; -1: padding
    num_scores: tl.tensor,  # i32[slots]  0: no logprobs; else 1 and the number of most likely tokens
    bounds: tl.tensor,  # f32[r]
    list_length: tl.tensor,  # i32[r]  becomes 0
    num_chunks: tl.tensor,
    num_groups: tl.tensor,
    GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    wanted = tl.load(num_scores + tl.maximum(slot, 0))
    wait_for_inputs()
    tl.store(list_length + row, 0)
    if (slot >= 0) & (wanted > 1):
        group = tl.arange(0, GROUPS)
        best = tl.load(best_of_groups + row * num_groups + group, mask=group < num_groups, other=-float("inf"))
        highest = highest_of(best_value, row, num_chunks, CHUNKS)
        tl.store(bounds + row, kth_largest(best, wanted - 1, highest) - highest)


@triton.jit
def _logit_of(logits: tl.tensor, row: tl.tensor, token: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """f32: the logit of one token; -1 is read as 0."""
    return cleaned(tl.load(logits + row.to(tl.int64) * vocab + tl.maximum(token, 0)))


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["rows", "num_scores", "last_tokens"])
def _score_kernel(
    logits: tl.tensor,  # f32[r, vocab]
    best_value: tl.tensor,  # f32[r, chunks]
    rows: tl.tensor,  # i32[r]
    num_scores: tl.tensor,  # i32[slots]
    last_tokens: tl.tensor,  # i32[slots]  the drawn tokens
    bounds: tl.tensor,  # f32[r]
    sums: tl.tensor,  # i64[r, chunks]
    counts: tl.tensor,  # i32[r, chunks]  logits above the token's
    list_length: tl.tensor,  # i32[r]
    list_values: tl.tensor,  # f32[r, LIST]
    list_ids: tl.tensor,  # i32[r, LIST]
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIST: tl.constexpr,
) -> None:
    chunk, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows + row)
    wanted = tl.load(num_scores + tl.maximum(slot, 0))
    wait_for_inputs()
    if (slot >= 0) & (wanted > 0):
        highest = highest_of(best_value, row, num_chunks, CHUNKS)
        drawn = _logit_of(logits, row, tl.load(last_tokens + slot), vocab) - highest
        column = chunk * CHUNK + tl.arange(0, CHUNK)
        values = load_logits(logits, row, column, vocab)
        shifted = values - highest
        place = row * num_chunks + chunk
        tl.store(sums + place, tl.sum(weights_of(values, highest, 1.0), axis=0))
        tl.store(counts + place, tl.sum((shifted > drawn).to(tl.int32), axis=0))
        if wanted > 1:
            reaches = (shifted >= tl.load(bounds + row)) & (shifted > -float("inf"))
            first = list_length + row + tl.zeros((CHUNK,), tl.int32)
            index = tl.atomic_add(first, tl.full((CHUNK,), 1, tl.int32), mask=reaches, sem="relaxed")  # any order
            fits = reaches & (index < LIST)
            tl.store(list_values + row * LIST + index, shifted, mask=fits)
            tl.store(list_ids + row * LIST + index, column, mask=fits)


@triton.jit
def _ranked(shifted: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """i64 in the order of (rising logit, falling id); no two are equal."""
    return (key_of(shifted).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _store_top(place: tl.tensor, best: tl.tensor, nothing: tl.tensor, MAX_TOP: tl.constexpr) -> None:
    """Write a ranked token; `nothing` is written as -1."""
    token = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    tl.store(place, tl.where(best > nothing, token, -1))
    tl.store(place + MAX_TOP, value_of((best >> 32).to(tl.int32)).to(tl.int32, bitcast=True))


@triton.jit(
    do_not_specialize=["num_chunks", "num_rows"],
    do_not_specialize_on_alignment=["rows", "num_scores", "last_tokens", "scores"],
)
def _report_kernel(
    logits: tl.tensor,
    best_value: tl.tensor,
    rows: tl.tensor,
    num_scores: tl.tensor,
    last_tokens: tl.tensor,
    sums: tl.tensor,
    counts: tl.tensor,
    list_length: tl.tensor,
    list_values: tl.tensor,
    list_ids: tl.tensor,
    turn: tl.tensor,  # i32[1]
    scores: tl.tensor,  # i32[turns, r, WORDS]  in the host's memory
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_rows: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIST: tl.constexpr,
    MAX_TOP: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    wanted = tl.load(num_scores + tl.maximum(slot, 0))
    wait_for_inputs()
    if (slot >= 0) & (wanted > 0):
        every = tl.arange(0, CHUNKS)
        exists = every < num_chunks
        highest = highest_of(best_value, row, num_chunks, CHUNKS)
        total = tl.sum(tl.load(sums + row * num_chunks + every, mask=exists, other=0), axis=0)
        above = tl.sum(tl.load(counts + row * num_chunks + every, mask=exists, other=0), axis=0)
        drawn = _logit_of(logits, row, tl.load(last_tokens + slot), vocab) - highest
        own = scores + (tl.load(turn) * num_rows + row) * (4 + 2 * MAX_TOP)
        tl.store(own, total.to(tl.int32))  # the low word first
        tl.store(own + 1, (total >> 32).to(tl.int32))
        tl.store(own + 2, drawn.to(tl.int32, bitcast=True))
        tl.store(own + 3, above + 1)
        length = tl.load(list_length + row)
        nothing = total * 0 - 0x7FFFFFFFFFFFFFFF
        number = slot * 0
        if length <= LIST:
            index = tl.arange(0, LIST)
            inside = index < length
            values = tl.load(list_values + row * LIST + index, mask=inside, other=0.0)
            ranked = _ranked(values, tl.load(list_ids + row * LIST + index, mask=inside, other=0))
            ranked = tl.where(inside, ranked, nothing)
            while number < wanted - 1:
                best = tl.max(ranked, axis=0)
                _store_top(own + 4 + number, best, nothing, MAX_TOP)
                ranked = tl.where(ranked == best, nothing, ranked)
                number += 1
        else:
            last = total * 0 + 0x7FFFFFFFFFFFFFFF
            while number < wanted - 1:  # the next in order, in the whole row
                candidates = tl.zeros((CHUNK,), tl.int64) + nothing
                for start in range(0, vocab, CHUNK):
                    column = start + tl.arange(0, CHUNK)
                    shifted = load_logits(logits, row, column, vocab) - highest
                    ranked_chunk = _ranked(shifted, column)
                    behind = (ranked_chunk < last) & (shifted > -float("inf"))
                    candidates = tl.maximum(candidates, tl.where(behind, ranked_chunk, nothing))
                last = tl.max(candidates, axis=0)
                _store_top(own + 4 + number, last, nothing, MAX_TOP)
                number += 1


def score_drawn(
    logits: torch.Tensor,  # f32[r, vocab]  the model's own
    best_value: torch.Tensor,  # f32[r, chunks]  of these logits
    best_of_groups: torch.Tensor,  # f32[r, groups]
    rows: torch.Tensor,  # i32[r]
    state: DeviceState,
    turn: torch.Tensor,  # i32[1]
    scores: torch.Tensor,  # i32[turns, r, WORDS]  its part `turn` is written
    chunk: int,
    list_size: int = TOP_LIST,
) -> None:
    """Score the newest token of every row whose slot has logprobs."""
    (num_rows, vocab), num_chunks, device = logits.shape, best_value.shape[1], logits.device
    chunks, num_groups = triton.next_power_of_2(num_chunks), best_of_groups.shape[1]
    bounds = torch.empty(num_rows, dtype=torch.float32, device=device)
    list_length = torch.empty(num_rows, dtype=torch.int32, device=device)
    sums = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=device)
    counts = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=device)
    list_values = torch.empty((num_rows, list_size), dtype=torch.float32, device=device)
    list_ids = torch.empty((num_rows, list_size), dtype=torch.int32, device=device)
    _bound_kernel[(num_rows,)](
        best_value, best_of_groups, rows, state.num_scores, bounds, list_length, num_chunks, num_groups,
        GROUPS=triton.next_power_of_2(num_groups), CHUNKS=chunks, num_warps=8, **EXACT,
    )  # fmt: skip
    _score_kernel[(num_chunks, num_rows)](
        logits, best_value, rows, state.num_scores, state.tokens, bounds, sums, counts, list_length, list_values,
        list_ids, vocab, num_chunks, CHUNK=chunk, CHUNKS=chunks, LIST=list_size, num_warps=8, **EXACT,
    )  # fmt: skip
    _report_kernel[(num_rows,)](
        logits, best_value, rows, state.num_scores, state.tokens, sums, counts, list_length, list_values, list_ids,
        turn, scores, vocab, num_chunks, num_rows, CHUNK=chunk, CHUNKS=chunks, LIST=list_size, MAX_TOP=MAX_TOP,
        num_warps=4, **EXACT,
    )  # fmt: skip


def read_scores(words: np.ndarray) -> TokenScores:
    """From i32[n, WORDS] that the device wrote."""
    ids, logits = words[:, 4 : 4 + MAX_TOP], words[:, 4 + MAX_TOP :]
    return TokenScores(
        totals=words[:, :2].copy().view(np.int64)[:, 0],
        logits=words[:, 2].copy().view(np.float32),
        ranks=words[:, 3].copy(),
        top_ids=ids,
        top_logits=logits.copy().view(np.float32),
    )
