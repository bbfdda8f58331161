# mypy: disallow-untyped-decorators=False
"""The scan of prompts in chunks: matrix products instead of one token after the other.

Within a chunk of C tokens let d_t be the sum of the logarithms of decay up to token t, S the state before the chunk,
and u_t the change that token t adds to the state (mamba: dt x; delta: beta (v - k^T r S), see `Recurrence`). Then

    y_t    = exp(d_t) q_t^T S + sum over i <= t of exp(d_t - d_i) (q_t . k_i) u_i
    S_new  = exp(d_C) S + sum over i of exp(d_C - d_i) k_i u_i^T

The changes of the delta rule depend on each other: (I + A) u = beta (v - exp(d) k^T S), where the matrix
A[t, i] = beta_t exp(d_t - d_i) (k_t . k_i) for i < t is strictly lower triangular and does not depend on the state.

    prepare    (chunks, heads)              the weights of the sums over i, and the inverse of I + A
    scan       (values, heads, sequences)   a tile of the state in registers, chunk by chunk

The order of sums depends on the chunks, and so on the tokens of a pass: deterministic mode scans token by token.
No exponent is positive, so no chunk overflows. Products are computed in TF32, with two correction terms if activations
are f32; the state stays f32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Recurrence, Storage
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.scan_plan import CHUNK, Chunks, programs_of

LARGEST_KEY = 256  # larger states are scanned token by token
FEWEST_VALUES, MOST_VALUES = 32, 128  # columns of the state in the registers of a program
FEWEST_PROGRAMS = 96  # of the scan: about one for each multiprocessor
LARGEST_WHOLE_KEY = 128  # with larger keys only `FEWEST_VALUES` fit in registers, and one chunk in shared memory
SOLVED = 16  # rows of a diagonal block that is inverted row by row


def has_steps(r: Recurrence) -> bool:
    """Whether the decays of a recurrence depend on the token."""
    return r.kind != "lightning"


@triton.jit
def head_group(head: tl.tensor, heads: tl.tensor, groups: tl.tensor, TILED: tl.constexpr) -> tl.tensor:
    """The group whose keys and queries a head uses."""
    return head % groups if TILED else head // (heads // groups)


@triton.jit
def positive_step(step: tl.tensor, least: tl.tensor, most: tl.tensor) -> tl.tensor:
    """softplus(step), clipped."""
    step = tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))
    return tl.minimum(tl.maximum(step, least), most)


@triton.jit
def bounded_step(step: tl.tensor, own_decay: tl.tensor, bound: tl.tensor) -> tl.tensor:
    """The logarithm of a decay of at least exp(-bound)."""
    return -bound / (1.0 + tl.exp(own_decay * step))


@triton.jit
def load_rows(source: tl.tensor, rows: tl.tensor, stride: tl.tensor, columns: tl.tensor, mask: tl.tensor) -> tl.tensor:
    return tl.load(source + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def inverse(a: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """(I + a)^-1 of a strictly lower triangular matrix of four blocks.

    The diagonal blocks D are inverted by forward substitution, all at once, row by row. With I + a = D (I + M), where
    M^4 = 0, the inverse is (I - M + M^2 - M^3) D^-1 = (I - M) (I + M^2) D^-1.
    """
    tl.static_assert(SIZE == 4 * BLOCK)
    row = tl.arange(0, SIZE)
    is_block = (row[:, None] // BLOCK) == (row[None, :] // BLOCK)
    solved = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for number in range(1, BLOCK):
        is_next = ((row % BLOCK) == number)[:, None]
        factors = tl.sum(tl.where(is_next & is_block, a, 0.0), axis=0)  # of each block's next row
        known = tl.sum(factors[:, None] * solved, axis=0)
        solved = tl.where(is_next & is_block, solved - known[None, :], solved)
    m = tl.dot(solved, tl.where(is_block, 0.0, a), input_precision=PRECISION)
    solved += tl.dot(tl.dot(m, m, input_precision=PRECISION), solved, input_precision=PRECISION)
    return solved - tl.dot(m, solved, input_precision=PRECISION)


@triton.jit(do_not_specialize_on_alignment=["starts", "lengths"])
def _prepare_kernel(
    mixed: tl.tensor,  # f32[t, channels]
    gates: tl.tensor,  # beta and a, or dt, of the heads: [t, ...]
    starts: tl.tensor,  # i32[c]
    lengths: tl.tensor,  # i32[c]
    decay: tl.tensor,  # f32[heads]
    bias: tl.tensor,
    sums: tl.tensor,  # f32[c, heads, 2, CHUNK]  d, and dt of mamba
    weights: tl.tensor,  # f32[c, heads, CHUNK, CHUNK]  exp(d_t - d_i) (q_t . k_i) for i <= t, 0 elsewhere
    solutions: tl.tensor,  # f32[c, heads, CHUNK, CHUNK]  (I + A)^-1 with columns times beta
    gate_stride: tl.tensor,
    heads: tl.tensor,
    groups: tl.tensor,
    key_size: tl.tensor,
    channels: tl.tensor,
    query_start: tl.tensor,
    key_start: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    rate_scale: tl.tensor,
    DELTA: tl.constexpr,
    STEPS: tl.constexpr,  # decays depend on the token
    TILED: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    chunk, head = tl.program_id(0), tl.program_id(1)
    group = head_group(head, heads, groups, TILED)
    row, key = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    own_decay, own_bias = tl.load(decay + head), tl.load(bias + head)
    wait_for_inputs()
    length = tl.load(lengths + chunk)
    if length > 0:  # plans of a fixed size have unused chunks
        inside = row < length
        start = tl.load(starts + chunk).to(tl.int64)
        gate = gates + start * gate_stride + head + row * gate_stride
        rate = tl.full((CHUNK,), 1.0, tl.float32)
        if STEPS:
            rate = tl.load(gate, mask=inside, other=0.0).to(tl.float32)
        step = rate
        if DELTA:
            step = tl.load(gate + heads, mask=inside, other=0.0).to(tl.float32)
        if STEPS:
            step = positive_step(step + own_bias, least, most)
        rate = tl.where(inside, rate_scale / (1.0 + tl.exp(-rate)) if DELTA else step, 0.0)
        total = tl.cumsum(tl.where(inside, step * own_decay, 0.0), axis=0)
        mask = inside[:, None] & (key < key_size)[None, :]
        first = mixed + start * channels + group * key_size
        keys = load_rows(first + key_start, row, channels, key, mask)
        queries = load_rows(first + query_start, row, channels, key, mask)
        decays = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
        place = chunk.to(tl.int64) * heads + head
        square = row[:, None] * CHUNK + row[None, :]
        shared = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * decays
        tl.store(weights + place * CHUNK * CHUNK + square, tl.where(row[:, None] >= row[None, :], shared, 0.0))
        tl.store(sums + place * 2 * CHUNK + row, total)
        tl.store(sums + place * 2 * CHUNK + CHUNK + row, rate)
        if DELTA:
            a = tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * decays * rate[:, None]
            a = tl.where(row[:, None] > row[None, :], a, 0.0)
            solution = inverse(a, CHUNK, BLOCK, PRECISION) * rate[None, :]
            tl.store(solutions + place * CHUNK * CHUNK + square, solution)


@triton.jit
def _scan_sequence(
    sequence: tl.tensor,
    head: tl.tensor,
    group: tl.tensor,
    row: tl.tensor,
    key: tl.tensor,
    column: tl.tensor,
    mixed: tl.tensor,
    states: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    first_chunks: tl.tensor,
    last_chunks: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    own_skip: tl.tensor,
    sums: tl.tensor,
    weights: tl.tensor,
    solutions: tl.tensor,
    out: tl.tensor,
    heads: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    channels: tl.tensor,
    query_start: tl.tensor,
    key_start: tl.tensor,
    value_start: tl.tensor,
    DELTA: tl.constexpr,
    HAS_STATES: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """The chunks of one sequence, one after the other."""
    has_key, has_value = key < key_size, column < value_size
    mask = has_key[:, None] & has_value[None, :]
    tile = key[:, None] * value_size + column[None, :]
    square = row[:, None] * CHUNK + row[None, :]
    first_chunk, last_chunk = tl.load(first_chunks + sequence), tl.load(last_chunks + sequence)
    state = tl.zeros((KEYS, VALUES), tl.float32)
    if HAS_STATES:
        read = tl.load(reads + sequence).to(tl.int64)
        state = tl.load(states + (read * heads + head) * key_size * value_size + tile, mask=mask, other=0.0)
    for chunk in tl.range(first_chunk, last_chunk, num_stages=STAGES):
        start, length = tl.load(starts + chunk).to(tl.int64), tl.load(lengths + chunk)
        token, inside = start + row, row < length
        place = (start * 0 + chunk) * heads + head  # in the interpreter `chunk` may be a Python integer
        is_key, is_value = inside[:, None] & has_key[None, :], inside[:, None] & has_value[None, :]
        keys = load_rows(mixed + key_start + group * key_size, token, channels, key, is_key)
        queries = load_rows(mixed + query_start + group * key_size, token, channels, key, is_key)
        values = load_rows(mixed + value_start + head * value_size, token, channels, column, is_value)
        total = tl.load(sums + place * 2 * CHUNK + row)
        at_end = tl.load(sums + place * 2 * CHUNK + CHUNK - 1)  # tokens after the end of a chunk do not decay
        grown = tl.exp(total)[:, None]
        if DELTA:
            solution = tl.load(solutions + place * CHUNK * CHUNK + square)
            left = values - grown * tl.dot(keys, state, input_precision=PRECISION)
            change = tl.dot(solution, left, input_precision=PRECISION)
        else:
            change = values * tl.load(sums + place * 2 * CHUNK + CHUNK + row)[:, None]
        y = grown * tl.dot(queries, state, input_precision=PRECISION) + own_skip * values
        y += tl.dot(tl.load(weights + place * CHUNK * CHUNK + square), change, input_precision=PRECISION)
        target = out + token[:, None] * heads * value_size + head * value_size + column[None, :]
        tl.store(target, y, mask=is_value)
        change *= tl.exp(at_end - total)[:, None]
        state = state * tl.exp(at_end) + tl.dot(tl.trans(keys), change, input_precision=PRECISION)
        if HAS_STATES:
            stored = tl.load(writes + start + length - 1).to(tl.int64)
            if stored > 0:
                tl.store(states + (stored * heads + head) * key_size * value_size + tile, state, mask=mask)


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
def _scan_chunks_kernel(
    mixed: tl.tensor,  # f32[t, channels]
    states: tl.tensor,  # f32[states, heads, key_size, value_size]
    starts: tl.tensor,  # i32[c]
    lengths: tl.tensor,  # i32[c]
    first_chunks: tl.tensor,  # i32[s]
    last_chunks: tl.tensor,  # i32[s]
    reads: tl.tensor,  # i32[s]
    num_sequences: tl.tensor,  # i32[1], if COUNTED
    writes: tl.tensor,  # i32[t]
    skip: tl.tensor,  # f32[heads]
    sums: tl.tensor,
    weights: tl.tensor,
    solutions: tl.tensor,
    out: tl.tensor,  # f32[t, heads * value_size]
    heads: tl.tensor,
    groups: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    channels: tl.tensor,
    query_start: tl.tensor,
    key_start: tl.tensor,
    value_start: tl.tensor,
    DELTA: tl.constexpr,
    TILED: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_STATES: tl.constexpr,
    COUNTED: tl.constexpr,  # programs share the sequences of a plan of fixed size; else one program has one sequence
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    head, first_sequence = tl.program_id(1), tl.program_id(2)
    group = head_group(head, heads, groups, TILED)
    row, key, column = tl.arange(0, CHUNK), tl.arange(0, KEYS), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    own_skip = 0.0
    if HAS_SKIP:
        own_skip = tl.load(skip + head)
    wait_for_inputs()
    if COUNTED:
        for sequence in tl.range(first_sequence, tl.load(num_sequences), tl.num_programs(2), num_stages=1):
            _scan_sequence(
                sequence, head, group, row, key, column, mixed, states, starts, lengths, first_chunks, last_chunks,
                reads, writes, own_skip, sums, weights, solutions, out, heads, key_size, value_size, channels,
                query_start, key_start, value_start, DELTA, HAS_STATES, KEYS, VALUES, CHUNK, STAGES, PRECISION,
            )  # fmt: skip
    else:
        sequence = first_sequence
        _scan_sequence(
            sequence, head, group, row, key, column, mixed, states, starts, lengths, first_chunks, last_chunks, reads,
            writes, own_skip, sums, weights, solutions, out, heads, key_size, value_size, channels, query_start,
            key_start, value_start, DELTA, HAS_STATES, KEYS, VALUES, CHUNK, STAGES, PRECISION,
        )  # fmt: skip


def scan_chunks(
    mixed: torch.Tensor,  # f32[t, channels]
    gates: torch.Tensor,  # [t, ...]  beta and a, or dt
    r: Recurrence,
    chunks: Chunks,
    writes: torch.Tensor,  # i32[t]
    storage: Storage | None,
    out: torch.Tensor,  # f32[t, heads * value_size]
    columns: tuple[int, int, int],  # of queries, keys and values in `mixed`
) -> None:
    """Scan the divided sequences; rows of `out` that belong to others stay unchanged."""
    is_delta, count = r.kind == "delta", len(chunks.starts)
    keys = max(16, triton.next_power_of_2(r.key_size))
    values = values_of(r, chunks)
    sums = torch.empty((count, r.heads, 2, CHUNK), dtype=torch.float32, device=mixed.device)
    weights = torch.empty((count, r.heads, CHUNK, CHUNK), dtype=torch.float32, device=mixed.device)
    solutions = torch.empty_like(weights) if is_delta else weights
    precision = "tf32x3" if gates.dtype == torch.float32 else "tf32"
    least, most = (0.0, float("inf")) if is_delta else r.dt_limits
    _prepare_kernel[(count, r.heads)](
        mixed, gates, chunks.starts, chunks.lengths, r.decay, r.bias if has_steps(r) else r.decay, sums, weights,
        solutions, gates.stride(0), r.heads, r.groups, r.key_size, r.channels, *columns[:2], least, most,
        r.rate_scale, DELTA=is_delta, STEPS=has_steps(r), TILED=r.tiled, KEYS=keys,
        CHUNK=CHUNK, BLOCK=SOLVED, PRECISION=precision, num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    tiles = triton.cdiv(r.value_size, values)
    _scan_chunks_kernel[(tiles, r.heads, programs_of(chunks, tiles * r.heads))](
        mixed, mixed if storage is None else storage.recurrent[r.layer], chunks.starts, chunks.lengths, chunks.first,
        chunks.last, chunks.reads, chunks.reads if chunks.count is None else chunks.count, writes,
        r.decay if r.skip is None else r.skip, sums, weights, solutions, out, r.heads, r.groups, r.key_size,
        r.value_size, r.channels, *columns, DELTA=is_delta, TILED=r.tiled,
        HAS_SKIP=r.skip is not None, HAS_STATES=storage is not None, COUNTED=chunks.count is not None, KEYS=keys,
        VALUES=values, CHUNK=CHUNK, STAGES=stages(keys, values), PRECISION=precision,
        num_warps=4 if values <= FEWEST_VALUES else 8, **OVERLAPPED,
    )  # fmt: skip


def values_of(r: Recurrence, chunks: Chunks) -> int:
    """Columns of the state of a program: all of them if the sequences are enough for the GPU.

    Every program of a head reads its keys and queries. A plan of fixed size may hold a single sequence.
    """
    values: int = max(16, triton.next_power_of_2(min(r.value_size, MOST_VALUES)))
    if chunks.count is not None or r.key_size > LARGEST_WHOLE_KEY:
        return min(values, FEWEST_VALUES)
    while values > FEWEST_VALUES and triton.cdiv(r.value_size, values) * r.heads * len(chunks.reads) < FEWEST_PROGRAMS:
        values //= 2
    return values


def stages(keys: int, values: int) -> int:
    """Chunks that are in flight to shared memory or used; two fit there with keys of 128 and few values."""
    return 2 if keys <= LARGEST_WHOLE_KEY and values <= FEWEST_VALUES else 1
