# mypy: disallow-untyped-decorators=False
"""From logits to tokens on the device: the largest, or one draw from the whole distribution.

The vocabulary of a row is cut into chunks. Greedy: the best of each chunk, then the best of those. A draw: the weights
of each chunk are summed, the chunk that the noise falls into is found, and then the token inside it. Weights are
integers and noise is a function of (seed, position), both as on the CPU (`sampling`), so the only difference
between the two is the last bit of the exponential.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs

CHUNK = 4096  # logits looked at together


@triton.jit
def cleaned(values: tl.tensor) -> tl.tensor:
    """NaN counts as excluded, +inf as the largest finite number."""
    values = tl.where(values == values, values, -float("inf"))
    return tl.minimum(values, 3.4028234663852886e38)


@triton.jit
def _best_of_chunks_kernel(
    logits: tl.tensor,  # f32[r, vocab]
    best_value: tl.tensor,  # f32[r, chunks]
    best_index: tl.tensor,  # i32[r, chunks]
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    chunk, row = tl.program_id(0), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    wait_for_inputs()
    values = tl.load(logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=-float("inf"))
    value, index = tl.max(cleaned(values), axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_value + row * num_chunks + chunk, value)
    tl.store(best_index + row * num_chunks + chunk, chunk * CHUNK + index)


@triton.jit(do_not_specialize_on_alignment=["rows", "temperature"])
def _chunk_sums_kernel(
    logits: tl.tensor,
    best_value: tl.tensor,
    rows: tl.tensor,  # i32[r]  slot of each row; -1: padding
    temperature: tl.tensor,  # f32[slots]
    sums: tl.tensor,  # i64[r, chunks]
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    chunk, row = tl.program_id(0), tl.program_id(1)
    warmth = tl.load(temperature + tl.maximum(tl.load(rows + row), 0))
    wait_for_inputs()
    if warmth > 0:
        every = tl.arange(0, CHUNKS)
        highest = tl.max(
            tl.load(best_value + row * num_chunks + every, mask=every < num_chunks, other=-float("inf")), axis=0
        )
        weights = _weights(logits, row, chunk, highest, warmth, vocab, CHUNK)
        tl.store(sums + row * num_chunks + chunk, tl.sum(weights, axis=0))


@triton.jit
def _weights(
    logits: tl.tensor,
    row: tl.tensor,
    chunk: tl.tensor,
    highest: tl.tensor,
    warmth: tl.tensor,
    vocab: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """i64[CHUNK]: exp of the cooled logits in units of 2**-40."""
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=-float("inf"))
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    return (tl.exp((cleaned(values) - highest) / warmth) * 1099511627776.0).to(tl.int64)


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


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["rows", "lengths", "last_tokens", "temperature", "seeds", "chosen"],
)
def _choose_kernel(
    logits: tl.tensor,
    best_value: tl.tensor,  # f32[r, chunks]
    best_index: tl.tensor,  # i32[r, chunks]
    sums: tl.tensor,  # i64[r, chunks]
    rows: tl.tensor,  # i32[r]
    lengths: tl.tensor,  # i32[slots]  tokens in the cache before this step; becomes one more
    last_tokens: tl.tensor,  # i32[slots]  becomes the chosen token
    temperature: tl.tensor,  # f32[slots]
    seeds: tl.tensor,  # i64[slots]
    turn: tl.tensor,  # i32[1]
    chosen: tl.tensor,  # i32[turns, r]  -1 where nothing can be chosen
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    num_rows: tl.tensor,
    DRAWS: tl.constexpr,  # some row has a temperature
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
            warmth = tl.load(temperature + slot)
            if warmth > 0:
                parts = tl.load(sums + row * num_chunks + every, mask=exists, other=0)
                total = tl.sum(parts, axis=0)
                noise = uniform(tl.load(seeds + slot).to(tl.uint64), length + 1, 0)
                target = tl.minimum((noise * total.to(tl.float64)).to(tl.int64), total - 1)
                running = tl.cumsum(parts, axis=0)
                chunk = tl.minimum(tl.sum(((running <= target) & exists).to(tl.int32), axis=0), num_chunks - 1)
                before = tl.sum(tl.where(every < chunk, parts, 0), axis=0)
                inside = tl.cumsum(_weights(logits, row, chunk, highest, warmth, vocab, CHUNK), axis=0) + before
                step = tl.sum((inside <= target).to(tl.int32), axis=0)
                token = tl.minimum(chunk * CHUNK + step, vocab - 1)
        token = tl.where(highest == -float("inf"), -1, token)
        tl.store(chosen + tl.load(turn) * num_rows + row, token)
        tl.store(last_tokens + slot, token)
        tl.store(lengths + slot, length + 1)


def choose_tokens(
    logits: torch.Tensor,  # f32[r, vocab]
    rows: torch.Tensor,  # i32[r]  slot of each row; -1: padding
    lengths: torch.Tensor,
    last_tokens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    turn: torch.Tensor,  # i32[1]
    chosen: torch.Tensor,  # i32[turns, r]  its row `turn` is written
    *,
    draws: bool,
) -> None:
    """Choose a token for every row, and advance its slot by it."""
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, CHUNK)
    best_value = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=logits.device)
    best_index = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    sums = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=logits.device)
    chunks = triton.next_power_of_2(num_chunks)
    _best_of_chunks_kernel[(num_chunks, num_rows)](
        logits, best_value, best_index, vocab, num_chunks, CHUNK=CHUNK, num_warps=4, **OVERLAPPED
    )
    if draws:
        _chunk_sums_kernel[(num_chunks, num_rows)](
            logits, best_value, rows, temperature, sums, vocab, num_chunks, CHUNK=CHUNK, CHUNKS=chunks, num_warps=4,
            **OVERLAPPED,
        )  # fmt: skip
    _choose_kernel[(num_rows,)](
        logits,
        best_value,
        best_index,
        sums,
        rows,
        lengths,
        last_tokens,
        temperature,
        seeds,
        turn,
        chosen,
        vocab,
        num_chunks,
        num_rows,
        DRAWS=draws,
        CHUNK=CHUNK,
        CHUNKS=chunks,
        num_warps=8,
        **OVERLAPPED,
    )
