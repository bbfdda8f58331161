# mypy: disallow-untyped-decorators=False
"""Typical sampling and XTC on the device: a draw of its own for the rows that have them, after top-k, top-p and min-p.

Neither keeps a beginning of the order of logits, so one program reads its whole row several times, in this order:

    cut         of top-k and top-p, by bisection (`selection.cut_of_row`)
    entropy     one pass: sums of weights and of weights times surprise
    typical     the smallest distance from the entropy within which lies enough weight, by bisection of the distance
    XTC         where the noise of the position says so: the least likely of the tokens that reach the threshold
    draw        sums of chunks, then one chunk in the order of ids

The sums and the numbers computed from them are those of `sampling.filters`, so tokens equal those of the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.pdl import wait_for_inputs
from bifolio.kernels.triton.selection import cut_of_row, kept_weights_of, key_of
from bifolio.kernels.triton.weights import EXACT, highest_of, load_logits, target_of, uniform, weights_of

FARTHEST = tl.constexpr(0x7F800000)  # key of an infinite distance
STREAM_XTC = tl.constexpr(1)  # of the noise, as in `sampling.weights`


@triton.jit
def _surprise(values: tl.tensor, highest: tl.tensor, warmth: tl.tensor) -> tl.tensor:
    """f64: -log of the probability of each token, up to a constant of the row."""
    return (-((values - highest) * warmth)).to(tl.float64)


@triton.jit
def _typical_weights(
    logits: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    highest: tl.tensor,
    warmth: tl.tensor,
    cut: tl.tensor,
    last_id: tl.tensor,
    min_weight: tl.tensor,
    entropy: tl.tensor,
    farthest: tl.tensor,  # i32  key of the largest distance from the entropy
    vocab: tl.tensor,
) -> tl.tensor:
    """(i32 keys of logits, i64 weights of the tokens that are kept so far, 0 for others)."""
    values = load_logits(logits, row, column, vocab)
    keys, weights = key_of(values), weights_of(values, highest, warmth)
    weights = kept_weights_of(keys, weights, column, cut, last_id, min_weight)
    distance = tl.abs(_surprise(values, highest, warmth) - entropy).to(tl.float32)
    return keys, tl.where(key_of(distance) <= farthest, weights, 0)


@triton.jit
def _without_likely(
    keys: tl.tensor, weights: tl.tensor, ids: tl.tensor, least: tl.tensor, last_key: tl.tensor, last_id: tl.tensor
) -> tl.tensor:
    """XTC: of the tokens whose weight reaches `least` only the last one stays."""
    is_likely = weights.to(tl.float64) >= least
    return tl.where(is_likely & ((keys != last_key) | (ids != last_id)), 0, weights)


@triton.jit(
    do_not_specialize=["num_chunks", "num_slots"],
    do_not_specialize_on_alignment=[
        "rows", "warmths", "top_ks", "top_ps", "min_weights", "lengths", "seeds", "rare_options",
    ],
)  # fmt: skip
def _draw_rare_kernel(
    logits: tl.tensor,
    best_value: tl.tensor,
    rows: tl.tensor,
    warmths: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_weights: tl.tensor,
    lengths: tl.tensor,
    seeds: tl.tensor,
    rare_options: tl.tensor,  # f64[3, slots]  typical_p, threshold and probability of XTC
    drawn: tl.tensor,  # i32[r]  replaced in rows that have these options
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_slots: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    is_padding = tl.load(rows + row) < 0
    slot = tl.maximum(tl.load(rows + row), 0)
    warmth, top_k, share = tl.load(warmths + slot), tl.load(top_ks + slot), tl.load(top_ps + slot)
    min_weight, seed = tl.load(min_weights + slot), tl.load(seeds + slot)
    typical, threshold = tl.load(rare_options + slot), tl.load(rare_options + num_slots + slot)
    probability = tl.load(rare_options + 2 * num_slots + slot)
    wait_for_inputs()
    position = tl.load(lengths + slot) + 1
    excludes = uniform(seed.to(tl.uint64), position, STREAM_XTC) < probability
    if (warmth > 0) & (not is_padding) & ((typical < 1.0) | excludes):
        highest = highest_of(best_value, row, num_chunks, CHUNKS)
        cut, last_id = cut_of_row(logits, row, highest, warmth, top_k, share, vocab, CHUNK)
        entropy, farthest = share * 0.0, top_k * 0 + FARTHEST
        if typical < 1.0:
            weight_sums, moment_sums = tl.zeros((CHUNK,), tl.int64), tl.zeros((CHUNK,), tl.int64)
            for start in range(0, vocab, CHUNK):
                column = start + tl.arange(0, CHUNK)
                values = load_logits(logits, row, column, vocab)
                weights = weights_of(values, highest, warmth)
                weights = kept_weights_of(key_of(values), weights, column, cut, last_id, min_weight)
                surprise = tl.where(weights > 0, _surprise(values, highest, warmth), 0.0)
                weight_sums += weights
                moment_sums += (weights.to(tl.float64) * surprise).to(tl.int64)
            total = tl.sum(weight_sums, axis=0).to(tl.float64)
            entropy = tl.sum(moment_sums, axis=0).to(tl.float64) / tl.maximum(total, 1.0)
            floor, ceiling = top_k.to(tl.int64) * 0, top_k.to(tl.int64) * 0 + FARTHEST
            while floor < ceiling:  # the smallest distance within which the weight reaches typical_p
                middle = (floor + ceiling) >> 1
                inside = tl.zeros((CHUNK,), tl.int64)
                for start in range(0, vocab, CHUNK):
                    _, weights = _typical_weights(
                        logits, row, start + tl.arange(0, CHUNK), highest, warmth, cut, last_id, min_weight, entropy,
                        middle.to(tl.int32), vocab,
                    )  # fmt: skip
                    inside += weights
                enough = tl.sum(inside, axis=0).to(tl.float64) >= total * typical
                floor, ceiling = tl.where(enough, floor, middle + 1), tl.where(enough, middle, ceiling)
            farthest = floor.to(tl.int32)
        least, stays_key, stays_id = share * 0.0 + float("inf"), top_k * 0, top_k * 0
        if excludes:
            inside = tl.zeros((CHUNK,), tl.int64)
            for start in range(0, vocab, CHUNK):
                _, weights = _typical_weights(
                    logits, row, start + tl.arange(0, CHUNK), highest, warmth, cut, last_id, min_weight, entropy,
                    farthest, vocab,
                )  # fmt: skip
                inside += weights
            least = threshold * tl.sum(inside, axis=0).to(tl.float64)
            # The last in the order (falling logit, rising id): the smallest of keys with the id behind, reversed.
            last = tl.full((CHUNK,), 0x7FFFFFFFFFFFFFFF, tl.int64)
            for start in range(0, vocab, CHUNK):
                column = start + tl.arange(0, CHUNK)
                keys, weights = _typical_weights(
                    logits, row, column, highest, warmth, cut, last_id, min_weight, entropy, farthest, vocab
                )
                joined = (keys.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
                last = tl.where(weights.to(tl.float64) >= least, tl.minimum(last, joined), last)
            found = tl.min(last, axis=0)
            stays_key, stays_id = (found >> 32).to(tl.int32), 0x7FFFFFFF - (found & 0x7FFFFFFF).to(tl.int32)
        every = tl.arange(0, CHUNKS)
        sums = tl.zeros((CHUNKS,), tl.int64)
        for chunk in range(num_chunks):
            column = chunk * CHUNK + tl.arange(0, CHUNK)
            keys, weights = _typical_weights(
                logits, row, column, highest, warmth, cut, last_id, min_weight, entropy, farthest, vocab
            )
            weights = _without_likely(keys, weights, column, least, stays_key, stays_id)
            sums = tl.where(every == chunk, tl.sum(weights, axis=0), sums)
        target = target_of(tl.sum(sums, axis=0), seed, position)
        passed = (tl.cumsum(sums, axis=0) <= target) & (every < num_chunks)
        chosen = tl.minimum(tl.sum(passed.to(tl.int32), axis=0), num_chunks - 1)
        before = tl.sum(tl.where(every < chosen, sums, 0), axis=0)
        column = chosen * CHUNK + tl.arange(0, CHUNK)
        keys, weights = _typical_weights(
            logits, row, column, highest, warmth, cut, last_id, min_weight, entropy, farthest, vocab
        )
        weights = _without_likely(keys, weights, column, least, stays_key, stays_id)
        step = tl.sum((tl.cumsum(weights, axis=0) + before <= target).to(tl.int32), axis=0)
        tl.store(drawn + row, tl.minimum(chosen * CHUNK + step, vocab - 1))


def draw_rare(
    logits: torch.Tensor,  # f32[r, vocab]
    best_value: torch.Tensor,  # f32[r, chunks]
    rows: torch.Tensor,  # i32[r]
    state: DeviceState,
    drawn: torch.Tensor,  # i32[r]
    chunk: int,
) -> None:
    """Replace the tokens of rows with typical sampling or XTC."""
    (num_rows, vocab), num_chunks = logits.shape, best_value.shape[1]
    _draw_rare_kernel[(num_rows,)](
        logits, best_value, rows, state.warmths, state.top_ks, state.top_ps, state.min_weights, state.lengths,
        state.seeds, state.rare_options, drawn, vocab, num_chunks, state.num_slots, CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(num_chunks), num_warps=16, **EXACT,
    )  # fmt: skip
