# mypy: disallow-untyped-decorators=False
"""The scan of prompts in chunks for RWKV-7, whose tokens first remove the value of a key from the state.

As `kernels.triton.keyed_chunks`. Let d_t be the sum of the logarithms of decay of a chunk up to token t, for each key,
c the removed key, b = rate c, and u_t the row that token t removes. Then with S the state before the chunk

    u_t    = (exp(d_t-1) c_t)^T S + sum over i < t of B[t, i] v_i - A[t, i] u_i
    y_t    = (exp(d_t) q_t)^T S + sum over i <= t of W[t, i] v_i - Z[t, i] u_i
    S_new  = exp(d_C) S + sum over i of exp(d_C - d_i) (k_i v_i^T - b_i u_i^T)

where A, Z multiply b and B, W multiply k, each with exp(d_t-1 - d_i) or exp(d_t - d_i). The rows u are solved for once
in each chunk, U = P V + H S, so that the scan needs four products: y = Y_S S + Y_V V, S_new = exp(d_C) S - R S + K V.
Logarithms lie above -0.61 a token: both factors of exp(d_t - d_i) = exp(d_t - d_m) exp(d_m - d_i) are finite around the
middle m of a chunk.

    prepare    (chunks, heads)              Y_S, Y_V, R, K, exp(d_C), and the bonus of each token
    scan       (values, heads, sequences)   a tile of the state in registers, chunk by chunk
    finish     (chunks, heads)              norm, bonus and gate
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Recurrence, Storage
from bifolio.kernels.rwkv import LEAST_LENGTH, SLOWEST
from bifolio.kernels.triton.chunked_scan import SOLVED, inverse, load_rows
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.scan_plan import CHUNK, Chunks, programs_of

LARGEST = 64  # keys of a head; larger states are scanned token by token
VALUES = 32  # columns of the state in the registers of a program


@triton.jit
def logistic(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _values_of(
    x: tl.tensor,  # row 0 of the values of a head
    row: tl.tensor,
    stride: tl.tensor,
    column: tl.tensor,
    mask: tl.tensor,
    to_amounts: tl.tensor,  # columns from the values to the amounts; those of the first layer follow
    inner: tl.tensor,
    MIXES_VALUES: tl.constexpr,
) -> tl.tensor:
    """f32[rows, columns]: values, mixed with those of the first layer."""
    value = load_rows(x, row, stride, column, mask).to(tl.float32)
    if MIXES_VALUES:
        amount = load_rows(x + to_amounts, row, stride, column, mask).to(tl.float32)
        of_first = load_rows(x + to_amounts + inner, row, stride, column, mask).to(tl.float32)
        value += logistic(amount) * (of_first - value)
    return value


@triton.jit(do_not_specialize_on_alignment=["starts", "lengths"])
def _prepare_kernel(
    x: tl.tensor,  # [t, in_features]  r, w, k, v, a, g, ...
    starts: tl.tensor,  # i32[c]
    lengths: tl.tensor,  # i32[c]
    factors: tl.tensor,  # f32[3, heads * key_size]
    matrices: tl.tensor,  # f32[c, heads, 4, CHUNK, CHUNK]  Y_S [tokens, keys], Y_V, R [keys, keys], K [tokens, keys]
    sums: tl.tensor,  # f32[c, heads, 2, CHUNK]  exp(d_C) of the keys, the bonus of the tokens
    x_stride: tl.tensor,
    heads: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    slowest: tl.tensor,
    least_length: tl.tensor,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, key = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    has_key = key < key_size
    keys, place = heads * key_size, head * key_size + key
    of_removed = tl.load(factors + place, mask=has_key, other=0.0)[None, :]
    of_key = tl.load(factors + keys + place, mask=has_key, other=0.0)[None, :]
    of_bonus = tl.load(factors + 2 * keys + place, mask=has_key, other=0.0)[None, :]
    wait_for_inputs()
    length = tl.load(lengths + chunk)
    if length > 0:  # plans of a fixed size have unused chunks
        mask = (row < length)[:, None] & has_key[None, :]
        own = x + tl.load(starts + chunk).to(tl.int64) * x_stride + head * key_size
        query = load_rows(own, row, x_stride, key, mask).to(tl.float32)
        step = slowest * logistic(load_rows(own + keys, row, x_stride, key, mask).to(tl.float32))
        step = tl.where(mask, step, 0.0)
        plain = load_rows(own + 2 * keys, row, x_stride, key, mask).to(tl.float32)
        to_rates = 3 * keys + heads * value_size
        rate = logistic(load_rows(own + to_rates, row, x_stride, key, mask).to(tl.float32))
        removed = plain * of_removed
        removed /= tl.maximum(tl.sqrt(tl.sum(removed * removed, axis=1)), least_length)[:, None]
        added = plain * (1.0 + (rate - 1.0) * of_key)
        total = tl.cumsum(step, axis=0)
        middle = tl.sum(tl.where((row == CHUNK // 2 - 1)[:, None], total, 0.0), axis=0)[None, :]
        at_end = tl.sum(step, axis=0)[None, :]  # tokens after the end of a chunk do not decay
        own_sums = sums + (chunk.to(tl.int64) * heads + head) * 2 * CHUNK
        tl.store(own_sums + key, tl.exp(tl.sum(step, axis=0)))
        tl.store(own_sums + CHUNK + row, tl.sum(query * added * of_bonus, axis=1))

        before = removed * tl.exp(total - step - middle)
        after = query * tl.exp(total - middle)
        shrunk = tl.exp(middle - total)
        earlier_keys, earlier_removed = tl.trans(added * shrunk), tl.trans(rate * removed * shrunk)
        below = row[:, None] > row[None, :]
        until = row[:, None] >= row[None, :]
        a = tl.where(below, tl.dot(before, earlier_removed, input_precision=PRECISION), 0.0)
        known = tl.where(below, tl.dot(before, earlier_keys, input_precision=PRECISION), 0.0)
        solution = inverse(a, CHUNK, BLOCK, PRECISION)
        of_values = tl.dot(solution, known, input_precision=PRECISION)  # P
        from_start = removed * tl.exp(total - step)
        of_state = tl.dot(solution, from_start, input_precision=PRECISION)  # H
        taken = tl.where(until, tl.dot(after, earlier_removed, input_precision=PRECISION), 0.0)
        given = tl.where(until, tl.dot(after, earlier_keys, input_precision=PRECISION), 0.0)
        left = tl.exp(at_end - total)
        rest = tl.trans(rate * removed * left)  # [keys, tokens]
        tile = matrices + (chunk.to(tl.int64) * heads + head) * 4 * CHUNK * CHUNK
        by_key = row[:, None] * CHUNK + key[None, :]
        y_state = query * tl.exp(total) - tl.dot(taken, of_state, input_precision=PRECISION)
        tl.store(tile + by_key, y_state)
        y_values = given - tl.dot(taken, of_values, input_precision=PRECISION)
        tl.store(tile + CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :], y_values)
        lost = tl.dot(rest, of_state, input_precision=PRECISION)
        tl.store(tile + 2 * CHUNK * CHUNK + key[:, None] * CHUNK + key[None, :], lost)
        gained = added * left - tl.trans(tl.dot(rest, of_values, input_precision=PRECISION))
        tl.store(tile + 3 * CHUNK * CHUNK + by_key, gained)


@triton.jit(
    do_not_specialize_on_alignment=[
        "starts", "lengths", "first_chunks", "last_chunks", "reads", "num_sequences", "writes",
    ]
)  # fmt: skip
def _scan_kernel(
    x: tl.tensor,
    states: tl.tensor,  # f32[states, heads, key_size, value_size]
    starts: tl.tensor,  # i32[c]
    lengths: tl.tensor,  # i32[c]
    first_chunks: tl.tensor,  # i32[s]
    last_chunks: tl.tensor,  # i32[s]
    reads: tl.tensor,  # i32[s]
    num_sequences: tl.tensor,  # i32[1], if COUNTED
    writes: tl.tensor,  # i32[t]
    matrices: tl.tensor,
    sums: tl.tensor,
    mixed: tl.tensor,  # f32[c, heads, CHUNK, value_size]  outputs before the norm
    x_stride: tl.tensor,
    heads: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    MIXES_VALUES: tl.constexpr,
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
    keys, inner = heads * key_size, heads * value_size
    by_key, square = row[:, None] * CHUNK + key[None, :], row[:, None] * CHUNK + row[None, :]
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
            place = (start * 0 + chunk) * heads + head  # in the interpreter `chunk` may be a Python integer
            is_value = (row < length)[:, None] & has_value[None, :]
            own_values = x + start * x_stride + 3 * keys + head * value_size
            to_amounts = keys + 2 * inner
            value = _values_of(own_values, row, x_stride, column, is_value, to_amounts, inner, MIXES_VALUES)
            parts = matrices + place * 4 * CHUNK * CHUNK
            y = tl.dot(tl.load(parts + by_key), state, input_precision=PRECISION)
            y += tl.dot(tl.load(parts + CHUNK * CHUNK + square), value, input_precision=PRECISION)
            target = mixed + (place * CHUNK + row)[:, None] * value_size + column[None, :]
            tl.store(target, y, mask=is_value)
            lost = tl.load(parts + 2 * CHUNK * CHUNK + key[:, None] * CHUNK + key[None, :])
            gained = tl.trans(tl.load(parts + 3 * CHUNK * CHUNK + by_key))
            change = tl.dot(gained, value, input_precision=PRECISION) - tl.dot(lost, state, input_precision=PRECISION)
            state = state * tl.load(sums + place * 2 * CHUNK + key)[:, None] + change
            if HAS_STATES:
                stored = tl.load(writes + start + length - 1).to(tl.int64)
                if stored > 0:
                    tl.store(states + (stored * heads + head) * key_size * value_size + tile, state, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["starts", "lengths"])
def _finish_kernel(
    x: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    mixed: tl.tensor,
    sums: tl.tensor,
    weight: tl.tensor,  # f32[heads * value_size]
    bias: tl.tensor,
    out: tl.tensor,  # [t, heads * value_size]
    x_stride: tl.tensor,
    heads: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    eps: tl.tensor,
    MIXES_VALUES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    chunk, head = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, CHUNK), tl.arange(0, VALUES)
    has_value = column < value_size
    keys, inner, place = heads * key_size, heads * value_size, head * value_size + column
    scale, shift = 1.0, 0.0
    if HAS_NORM:
        scale = tl.load(weight + place, mask=has_value, other=0.0)[None, :]
    if HAS_BIAS:
        shift = tl.load(bias + place, mask=has_value, other=0.0)[None, :]
    wait_for_inputs()
    length = tl.load(lengths + chunk)
    if length > 0:
        mask = (row < length)[:, None] & has_value[None, :]
        start = tl.load(starts + chunk).to(tl.int64)
        part = chunk.to(tl.int64) * heads + head
        y = load_rows(mixed + part * CHUNK * value_size, row, value_size, column, mask)
        if HAS_NORM:
            y = tl.where(mask, y - (tl.sum(y, axis=1) / value_size)[:, None], 0.0)
            y = y / tl.sqrt(tl.sum(y * y, axis=1) / value_size + eps)[:, None] * scale + shift
        own = x + start * x_stride + 3 * keys + head * value_size
        value = _values_of(own, row, x_stride, column, mask, keys + 2 * inner, inner, MIXES_VALUES)
        gate = load_rows(own + keys + inner, row, x_stride, column, mask).to(tl.float32)
        y = (y + tl.load(sums + part * 2 * CHUNK + CHUNK + row)[:, None] * value) * gate
        target = out + (start + row)[:, None] * inner + head * value_size + column[None, :]
        tl.store(target, y.to(out.dtype.element_ty), mask=mask)


def has_chunks(r: Recurrence) -> bool:
    return r.key_size <= LARGEST


def scan_rwkv_chunks(
    x: torch.Tensor,  # [t, in_features]
    r: Recurrence,
    chunks: Chunks,
    writes: torch.Tensor,  # i32[t]
    storage: Storage | None,
    out: torch.Tensor,  # [t, heads * value_size]
) -> None:
    """Scan the divided sequences; rows of `out` that belong to others stay unchanged."""
    count, keys = len(chunks.starts), max(16, triton.next_power_of_2(r.key_size))

    def scratch(*size: int) -> torch.Tensor:
        return torch.empty((count, r.heads, *size), dtype=torch.float32, device=x.device)

    matrices, sums, mixed = scratch(4, CHUNK, CHUNK), scratch(2, CHUNK), scratch(CHUNK, r.value_size)
    precision = "tf32x3" if x.dtype == torch.float32 else "tf32"
    sizes = x.stride(0), r.heads, r.key_size, r.value_size
    _prepare_kernel[(count, r.heads)](
        x, chunks.starts, chunks.lengths, r.factors, matrices, sums, *sizes, SLOWEST, LEAST_LENGTH, KEYS=keys,
        CHUNK=CHUNK, BLOCK=SOLVED, PRECISION=precision, num_warps=8, **OVERLAPPED,
    )  # fmt: skip
    tiles = triton.cdiv(r.value_size, VALUES)
    _scan_kernel[(tiles, r.heads, programs_of(chunks, tiles * r.heads))](
        x, x if storage is None else storage.recurrent[r.layer], chunks.starts, chunks.lengths, chunks.first,
        chunks.last, chunks.reads, chunks.reads if chunks.count is None else chunks.count, writes, matrices, sums,
        mixed, *sizes, MIXES_VALUES=r.mixes_values, HAS_STATES=storage is not None, COUNTED=chunks.count is not None,
        KEYS=keys, VALUES=VALUES, CHUNK=CHUNK, PRECISION=precision, num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    norm = r.norm
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    _finish_kernel[(count, r.heads)](
        x, chunks.starts, chunks.lengths, mixed, sums, r.factors if weight is None else weight,
        r.factors if bias is None else bias, out, *sizes, 0.0 if norm is None else norm.eps,
        MIXES_VALUES=r.mixes_values, HAS_NORM=weight is not None, HAS_BIAS=bias is not None,
        VALUES=triton.next_power_of_2(r.value_size), CHUNK=CHUNK, num_warps=4, **OVERLAPPED,
    )  # fmt: skip
