# mypy: disallow-untyped-decorators=False
"""Weights and noise on the device: the numbers of `kernels.weights` and `sampling.weights`, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from bifolio.kernels.triton.pdl import OVERLAPPED

EXACT = {**OVERLAPPED, "enable_fp_fusion": False}  # options of a launch: weights are defined by single operations


@triton.jit
def cleaned(values: tl.tensor) -> tl.tensor:
    """NaN counts as excluded, +inf as the largest finite number."""
    values = tl.where(values == values, values, -float("inf"))
    return tl.minimum(values, 3.4028234663852886e38)


@triton.jit
def load_logits(logits: tl.tensor, row: tl.tensor, column: tl.tensor, vocab: tl.tensor) -> tl.tensor:
    """f32 like `column`; -inf behind the end of the row."""
    return cleaned(tl.load(logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=-float("inf")))


@triton.jit
def weights_of(values: tl.tensor, highest: tl.tensor, warmth: tl.tensor) -> tl.tensor:
    """i64: weights of cleaned logits, as in `kernels.weights`; `highest` is their largest, 0 if that is -inf."""
    value = tl.minimum(tl.maximum((values - highest) * warmth, -60.0), 0.0)
    n = tl.floor(value * 1.44269504088896341 + 0.5)
    r = (value - n * 0.693359375) - n * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * (r * r) + r + 1.0
    bits = (p * 16777216.0).to(tl.int32)  # below 2 ** 25: conversions to 64 bits take four times as long
    places = tl.minimum((-n).to(tl.int32), 63)
    return (bits.to(tl.int64) << 16) >> places.to(tl.int64)


@triton.jit
def highest_of(best_value: tl.tensor, row: tl.tensor, num_chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    """The largest logit of a row; 0 if all are -inf."""
    every = tl.arange(0, CHUNKS)
    values = tl.load(best_value + row * num_chunks + every, mask=every < num_chunks, other=-float("inf"))
    highest = tl.max(values, axis=0)
    return tl.where(highest == -float("inf"), 0.0, highest)


@triton.jit
def _mixed(state: tl.tensor) -> tl.tensor:
    """The finaliser of splitmix64."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def uniform(seed: tl.tensor, position: tl.tensor, STREAM: tl.constexpr) -> tl.tensor:
    """f64 in [0, 1), the same as `sampling.weights.uniform`."""
    golden = seed * 0 + 0x9E3779B97F4A7C15
    state = _mixed(seed + golden)
    state = _mixed((state ^ position.to(tl.uint64)) + golden)
    state = _mixed((state ^ STREAM) + golden)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def target_of(total: tl.tensor, seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """i64 below the total: the token whose running sum is the first above it is drawn."""
    noise = uniform(seed.to(tl.uint64), position, 0)
    return tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
