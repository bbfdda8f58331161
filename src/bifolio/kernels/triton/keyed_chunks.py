# mypy: disallow-untyped-decorators=False
"""The scan of prompts in chunks for keyed recurrences, whose states have a decay for each row.

As `kernels.triton.chunked_scan`, with a sum of logarithms d_t for each key:

    y_t    = (exp(d_t) q_t)^T S + sum over i <= t of W[t, i] u_i      W[t, i] = sum over keys of exp(d_t - d_i) q_t k_i
    S_new  = exp(d_C) S + sum over i of (exp(d_C - d_i) k_i) u_i^T

and A[t, i] = beta_t times the same sum with k_t in place of q_t. A chunk is cut into blocks of 16 tokens. Where t and i
lie in different blocks, both factors of exp(d_t - d_i) = exp(d_t - d_e) exp(d_e - d_i) are at most 1, where e is the
last token before the block of t, and the sums are matrix products; within a block they are computed one by one.

    decay      (chunks, heads)              the sums of the logarithms, and beta
    weigh      (chunks, heads)              W, and the inverse of I + A
    scan       (values, heads, sequences)   a tile of the state in registers, chunk by chunk
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Recurrence, Storage
from bifolio.kernels.triton.chunked_scan import SOLVED, bounded_step, inverse, load_rows, positive_step, values_of
from bifolio.kernels.triton.delta_step import head_steps
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.scan_plan import CHUNK, Chunks, programs_of


@triton.jit(do_not_specialize_on_alignment=["starts", "lengths"])
def _decay_kernel(
    gates: tl.tensor,  # beta and a of the heads: [t, ...]
    starts: tl.tensor,  # i32[c]
    lengths: tl.tensor,  # i32[c]
    decay: tl.tensor,  # f32[heads]
    bias: tl.tensor,  # f32[heads * key_size]
    sums: tl.tensor,  # f32[c, heads, CHUNK, KEYS]
    rates: tl.tensor,  # f32[c, heads, CHUNK]  rate_scale * sigmoid(beta)
    gate_stride: tl.tensor,
    heads: tl.tensor,
    key_size: tl.tensor,
    rate_scale: tl.tensor,
    bound: tl.tensor,
    BOUNDED: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, key = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    own_decay, own_bias, steps = head_steps(decay, bias, head, heads, key_size, key, True)
    wait_for_inputs()
    length = tl.load(lengths + chunk)
    if length > 0:  # plans of a fixed size have unused chunks
        inside = row < length
        gate = gates + (tl.load(starts + chunk).to(tl.int64) + row) * gate_stride + head
        rate = rate_scale / (1.0 + tl.exp(-tl.load(gate, mask=inside, other=0.0).to(tl.float32)))
        step = tl.load(gate[:, None] + steps[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        step += own_bias[None, :]
        step = bounded_step(step, own_decay, bound) if BOUNDED else positive_step(step, 0.0, float("inf")) * own_decay
        total = tl.cumsum(tl.where(inside[:, None], step, 0.0), axis=0)
        place = (chunk.to(tl.int64) * heads + head) * CHUNK + row
        tl.store(sums + place[:, None] * KEYS + key[None, :], total)
        tl.store(rates + place, tl.where(inside, rate, 0.0))


@triton.jit(do_not_specialize_on_alignment=["starts", "lengths"])
def _weigh_kernel(
    mixed: tl.tensor,  # f32[t, channels]
    starts: tl.tensor,  # i32[c]
    lengths: tl.tensor,  # i32[c]
    sums: tl.tensor,  # f32[c, heads, CHUNK, KEYS]
    rates: tl.tensor,  # f32[c, heads, CHUNK]
    weights: tl.tensor,  # f32[c, heads, CHUNK, CHUNK]  W
    solutions: tl.tensor,  # f32[c, heads, CHUNK, CHUNK]  (I + A)^-1 with columns times beta
    heads: tl.tensor,
    key_size: tl.tensor,
    channels: tl.tensor,
    query_start: tl.tensor,
    key_start: tl.tensor,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, key = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    has_key = key < key_size
    wait_for_inputs()
    length = tl.load(lengths + chunk)
    if length > 0:
        place = chunk.to(tl.int64) * heads + head
        first = mixed + tl.load(starts + chunk).to(tl.int64) * channels + head * key_size
        own = sums + place * CHUNK * KEYS
        mask = (row < length)[:, None] & has_key[None, :]
        keys = load_rows(first + key_start, row, channels, key, mask)
        queries = load_rows(first + query_start, row, channels, key, mask)
        total = tl.load(own + row[:, None] * KEYS + key[None, :])
        weight = tl.zeros((CHUNK, CHUNK), tl.float32)
        likeness = tl.zeros((CHUNK, CHUNK), tl.float32)
        for block in tl.static_range(1, CHUNK // BLOCK):
            edge = tl.load(own + (block * BLOCK - 1) * KEYS + key)[None, :]
            after = tl.where((row // BLOCK == block)[:, None], tl.exp(tl.minimum(total - edge, 0.0)), 0.0)
            before = tl.where((row < block * BLOCK)[:, None], tl.exp(tl.minimum(edge - total, 0.0)), 0.0)
            earlier = tl.trans(keys * before)
            weight += tl.dot(queries * after, earlier, input_precision=PRECISION)
            likeness += tl.dot(keys * after, earlier, input_precision=PRECISION)
        for number in range(BLOCK):
            other = row // BLOCK * BLOCK + number  # of each row's block
            is_other = (other < length)[:, None] & has_key[None, :]
            near = load_rows(first + key_start, other, channels, key, is_other)
            near *= tl.exp(tl.minimum(total - tl.load(own + other[:, None] * KEYS + key[None, :]), 0.0))
            here = other[:, None] == row[None, :]
            weight += tl.where(here, tl.sum(queries * near, axis=1)[:, None], 0.0)
            likeness += tl.where(here, tl.sum(keys * near, axis=1)[:, None], 0.0)
        rate = tl.load(rates + place * CHUNK + row)
        square = place * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :]
        tl.store(weights + square, tl.where(row[:, None] >= row[None, :], weight, 0.0))
        a = tl.where(row[:, None] > row[None, :], likeness * rate[:, None], 0.0)
        tl.store(solutions + square, inverse(a, CHUNK, BLOCK, PRECISION) * rate[None, :])


@triton.jit(
    do_not_specialize_on_alignment=[
        "starts",
        "lengths",
        "first_chunks",
        "last_chunks",
        "reads",
        "num_sequences",
        "writes",
    ]
)
def _scan_kernel(
    mixed: tl.tensor,  # f32[t, channels]
    states: tl.tensor,  # f32[states, heads, key_size, value_size]
    starts: tl.tensor,  # i32[c]
    lengths: tl.tensor,  # i32[c]
    first_chunks: tl.tensor,  # i32[s]
    last_chunks: tl.tensor,  # i32[s]
    reads: tl.tensor,  # i32[s]
    num_sequences: tl.tensor,  # i32[1], if COUNTED
    writes: tl.tensor,  # i32[t]
    sums: tl.tensor,
    weights: tl.tensor,
    solutions: tl.tensor,
    out: tl.tensor,  # f32[t, heads * value_size]
    heads: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    channels: tl.tensor,
    query_start: tl.tensor,
    key_start: tl.tensor,
    value_start: tl.tensor,
    HAS_STATES: tl.constexpr,
    COUNTED: tl.constexpr,  # programs share the sequences of a plan of fixed size; else one program has one sequence
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    head, first_sequence = tl.program_id(1), tl.program_id(2)
    row, key, column = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    has_key, has_value = key < key_size, column < value_size
    mask = has_key[:, None] & has_value[None, :]
    tile = key[:, None] * value_size + column[None, :]
    square = row[:, None] * CHUNK + row[None, :]
    wait_for_inputs()
    last_sequence = first_sequence + 1
    if COUNTED:
        last_sequence = tl.load(num_sequences)
    for sequence in tl.range(first_sequence, last_sequence, tl.num_programs(2), num_stages=1):
        state = tl.zeros((KEYS, VALUES), tl.float32)
        if HAS_STATES:
            read = tl.load(reads + sequence).to(tl.int64)
            state = tl.load(states + (read * heads + head) * key_size * value_size + tile, mask=mask, other=0.0)
        for chunk in tl.range(tl.load(first_chunks + sequence), tl.load(last_chunks + sequence), num_stages=1):
            start, length = tl.load(starts + chunk).to(tl.int64), tl.load(lengths + chunk)
            token, inside = start + row, row < length
            place = (start * 0 + chunk) * heads + head  # in the interpreter `chunk` may be a Python integer
            is_key, is_value = inside[:, None] & has_key[None, :], inside[:, None] & has_value[None, :]
            keys = load_rows(mixed + key_start + head * key_size, token, channels, key, is_key)
            queries = load_rows(mixed + query_start + head * key_size, token, channels, key, is_key)
            values = load_rows(mixed + value_start + head * value_size, token, channels, column, is_value)
            own = sums + place * CHUNK * KEYS
            total = tl.load(own + row[:, None] * KEYS + key[None, :])
            at_end = tl.load(own + (CHUNK - 1) * KEYS + key)  # tokens after the end of a chunk do not decay
            grown = tl.exp(total)
            left = values - tl.dot(keys * grown, state, input_precision=PRECISION)
            solution = tl.load(solutions + place * CHUNK * CHUNK + square)
            change = tl.dot(solution, left, input_precision=PRECISION)
            y = tl.dot(queries * grown, state, input_precision=PRECISION)
            y += tl.dot(tl.load(weights + place * CHUNK * CHUNK + square), change, input_precision=PRECISION)
            target = out + token[:, None] * heads * value_size + head * value_size + column[None, :]
            tl.store(target, y, mask=is_value)
            keys *= tl.exp(at_end[None, :] - total)
            state = state * tl.exp(at_end)[:, None] + tl.dot(tl.trans(keys), change, input_precision=PRECISION)
            if HAS_STATES:
                stored = tl.load(writes + start + length - 1).to(tl.int64)
                if stored > 0:
                    tl.store(states + (stored * heads + head) * key_size * value_size + tile, state, mask=mask)


def scan_keyed_chunks(
    mixed: torch.Tensor,  # f32[t, channels]
    gates: torch.Tensor,  # [t, ...]  beta and a
    r: Recurrence,
    chunks: Chunks,
    writes: torch.Tensor,  # i32[t]
    storage: Storage | None,
    out: torch.Tensor,  # f32[t, heads * value_size]
    columns: tuple[int, int, int],  # of queries, keys and values in `mixed`
) -> None:
    """Scan the divided sequences; rows of `out` that belong to others stay unchanged."""
    count, keys = len(chunks.starts), max(16, triton.next_power_of_2(r.key_size))
    values = min(values_of(r, chunks), 32)
    sums = torch.empty((count, r.heads, CHUNK, keys), dtype=torch.float32, device=mixed.device)
    rates = torch.empty((count, r.heads, CHUNK), dtype=torch.float32, device=mixed.device)
    weights = torch.empty((count, r.heads, CHUNK, CHUNK), dtype=torch.float32, device=mixed.device)
    solutions = torch.empty_like(weights)
    precision = "tf32x3" if gates.dtype == torch.float32 else "tf32"
    _decay_kernel[(count, r.heads)](
        gates, chunks.starts, chunks.lengths, r.decay, r.bias, sums, rates, gates.stride(0), r.heads, r.key_size,
        r.rate_scale, r.decay_bound, BOUNDED=r.decay_bound > 0, KEYS=keys, CHUNK=CHUNK, num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    _weigh_kernel[(count, r.heads)](
        mixed, chunks.starts, chunks.lengths, sums, rates, weights, solutions, r.heads, r.key_size, r.channels,
        *columns[:2], KEYS=keys, CHUNK=CHUNK, BLOCK=SOLVED, PRECISION=precision, num_warps=8, **OVERLAPPED,
    )  # fmt: skip
    tiles = triton.cdiv(r.value_size, values)
    _scan_kernel[(tiles, r.heads, programs_of(chunks, tiles * r.heads))](
        mixed, mixed if storage is None else storage.recurrent[r.layer], chunks.starts, chunks.lengths, chunks.first,
        chunks.last, chunks.reads, chunks.reads if chunks.count is None else chunks.count, writes, sums, weights,
        solutions, out, r.heads, r.key_size, r.value_size, r.channels, *columns, HAS_STATES=storage is not None,
        COUNTED=chunks.count is not None, KEYS=keys, VALUES=values, CHUNK=CHUNK, PRECISION=precision, num_warps=4,
        **OVERLAPPED,
    )  # fmt: skip
