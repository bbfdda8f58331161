# mypy: disallow-untyped-decorators=False
"""Recurrent layers on a GPU: convolution, scan and gated norm, one kernel each.

    convolve   (tokens, channels)            convolution and silu, norms of queries and keys; writes the windows
    scan       (values, heads, sequences)    a tile of the state in registers, token by token; writes the states
    finish     (tokens)                      gate and norm

Outside deterministic mode prompts are scanned in chunks (`kernels.triton.chunked_scan`).

Starts, reads and writes of states are device arrays and no size depends on their values, so a step runs inside a CUDA
graph. No tile depends on the size of a pass, so neither do results of the scan token by token. The windows that a pass
reads are copied first: another program may write them while they are needed. In a decode step one program reads and
writes all of a window, so that no copy is needed, and the scan has no loop over tokens; deterministic mode has neither.
Few sequences of gated delta nets are scanned and finished in one kernel (`kernels.triton.delta_step`); on Hopper the
convolution of one or two is part of it (`kernels.cuda.row_delta`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.cuda.row_delta import can_step, row_delta
from bifolio.kernels.interface import Recurrence, Storage
from bifolio.kernels.recurrence import L2_EPS
from bifolio.kernels.triton.chunked_scan import (
    LARGEST_KEY,
    bounded_step,
    has_steps,
    head_group,
    positive_step,
    scan_chunks,
)
from bifolio.kernels.triton.delta_step import delta_step, gated_norm, has_one_step, head_steps
from bifolio.kernels.triton.keyed_chunks import scan_keyed_chunks
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.rwkv import recur_rwkv
from bifolio.kernels.triton.scan_plan import Spans, StagedStates, programs_of

CONV_BLOCK = 256  # channels of a program of a convolution layer
CONV_SIZE = 1024  # numbers of a program of the convolution
STATE_SIZE = 2048  # numbers of the state in the registers of a program of the scan, which is one warp
STAGES = 3  # tokens of the scan that are read ahead
COUNTED_PROGRAMS = 4096  # of a scan over a plan of fixed size, about
DECODE_SIZE, DECODE_WARPS = 4096, 2  # of a program of a decode step's scan: whole lines of 32 values


@triton.jit
def _convolve_kernel(
    x: tl.tensor,  # [t, in_features]
    windows: tl.tensor,  # f32[states, WIDTH - 1, channels]
    old: tl.tensor,  # f32[s, WIDTH - 1, channels]  the windows that the sequences continue; if IS_DECODE all windows
    reads: tl.tensor,  # i32[s]
    sequences: tl.tensor,  # i32[t]
    starts: tl.tensor,  # i32[s + 1]
    writes: tl.tensor,  # i32[t]
    weight: tl.tensor,  # f32[channels, WIDTH]
    bias: tl.tensor,  # f32[channels]
    out: tl.tensor,  # [t, channels]
    num_tokens: tl.tensor,
    channels: tl.tensor,
    x_stride: tl.tensor,
    first_channel: tl.tensor,  # column of x
    num_queries: tl.tensor,  # units of queries, and of keys
    key_start: tl.tensor,  # channel of the first of them
    key_size: tl.tensor,
    value_start: tl.tensor,
    value_size: tl.tensor,
    query_scale: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,  # a convolution layer: of b * x, times c
    PLAIN: tl.constexpr,  # no activation
    UNIT: tl.constexpr,  # queries and keys have length 1
    HAS_BIAS: tl.constexpr,
    HAS_STATES: tl.constexpr,
    IS_DECODE: tl.constexpr,  # token i is the only one of sequence i
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    unit = tl.program_id(1)
    tokens = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    inside = tokens < num_tokens
    is_key = unit < 2 * num_queries
    size = tl.where(is_key, key_size, value_size)
    begin = tl.where(is_key, key_start + unit * key_size, value_start + (unit - 2 * num_queries) * value_size)
    lanes = tl.arange(0, BLOCK)
    used = (lanes < size) & (begin + lanes < channels)
    channel = begin + lanes
    mask = inside[:, None] & used[None, :]
    wait_for_inputs()
    if IS_DECODE:
        start = tokens
        source = tokens
        if HAS_STATES:
            source = tl.load(reads + tokens, mask=inside, other=0).to(tl.int64)
    else:
        source = tl.load(sequences + tokens, mask=inside, other=0).to(tl.int64)
        start = tl.load(starts + source, mask=inside, other=0).to(tl.int64)
    target = tl.full((TOKENS,), -1, tl.int64)
    if HAS_STATES:
        target = tl.load(writes + tokens, mask=inside, other=-1).to(tl.int64)
    y = tl.zeros((TOKENS, BLOCK), tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + channel, mask=used, other=0.0)[None, :]
    for tap in tl.static_range(WIDTH):
        at = tokens - (WIDTH - 1 - tap)
        own = mask & (at >= start)[:, None]
        place = x + at[:, None] * x_stride + first_channel + channel[None, :]
        value = tl.load(place, mask=own, other=0.0).to(tl.float32)
        if GATED:
            value *= tl.load(place + 2 * channels, mask=own, other=0.0).to(tl.float32)
        if HAS_STATES:
            row = source * (WIDTH - 1) + (WIDTH - 1) + (at - start)
            earlier = mask & (at < start)[:, None]
            value += tl.load(old + row[:, None] * channels + channel[None, :], mask=earlier, other=0.0)
            if tap > 0:
                kept = target * (WIDTH - 1) + (tap - 1)
                stored = mask & (target > 0)[:, None]
                tl.store(windows + kept[:, None] * channels + channel[None, :], value, mask=stored)
        y += value * tl.load(weight + channel * WIDTH + tap, mask=used, other=0.0)[None, :]
    if GATED:
        gate = x + tokens[:, None] * x_stride + channels + channel[None, :]
        y *= tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    elif not PLAIN:
        y = tl.where(used[None, :], y / (1.0 + tl.exp(-y)), 0.0)
    if UNIT:
        length = tl.sqrt(tl.sum(y * y, axis=1) + eps)
        factor = tl.where(unit < num_queries, query_scale, 1.0) / length
        y = tl.where(is_key, y * factor[:, None], y)
    place = out + tokens[:, None] * channels + channel[None, :]
    tl.store(place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _advanced(
    state: tl.tensor,  # f32[keys, values]
    key: tl.tensor,  # f32[keys]
    value: tl.tensor,  # f32[values]
    gate: tl.tensor,  # beta of the head, or dt
    steps: tl.tensor,  # where a lies behind beta; KEYED: of each row
    own_decay: tl.tensor,
    own_bias: tl.tensor,  # KEYED: of each row
    least: tl.tensor,
    most: tl.tensor,
    rate_scale: tl.tensor,
    bound: tl.tensor,
    DELTA: tl.constexpr,
    KEYED: tl.constexpr,
    BOUNDED: tl.constexpr,
    STEPS: tl.constexpr,
) -> tl.tensor:
    """The state after one token more."""
    change = value
    if STEPS:
        if DELTA:
            rate = rate_scale / (1.0 + tl.exp(-tl.load(gate).to(tl.float32)))
            step = tl.load(gate + steps).to(tl.float32) + own_bias
        else:
            step = tl.load(gate).to(tl.float32) + own_bias
        if BOUNDED:
            kept = tl.exp(bounded_step(step, own_decay, bound))
        else:
            step = positive_step(step, least, most)
            kept = tl.exp(step * own_decay)
        if KEYED:
            kept = kept[:, None]
        state *= kept
        change = rate * (value - tl.sum(state * key[:, None], axis=0)) if DELTA else step * value
    else:
        state *= tl.exp(own_decay)
    return state + key[:, None] * change[None, :]


@triton.jit(do_not_specialize_on_alignment=["starts", "ends", "reads", "num_sequences", "writes"])
def _scan_kernel(
    mixed: tl.tensor,  # f32[t, channels]
    gates: tl.tensor,  # beta and a, or dt, of the heads: [t, ...]
    states: tl.tensor,  # f32[states, heads, key_size, value_size]
    starts: tl.tensor,  # i32[s]
    ends: tl.tensor,  # i32[s]
    reads: tl.tensor,  # i32[s]
    num_sequences: tl.tensor,  # i32[1], if COUNTED
    writes: tl.tensor,  # i32[t]
    decay: tl.tensor,  # f32[heads]
    bias: tl.tensor,
    skip: tl.tensor,
    out: tl.tensor,  # f32[t, heads * value_size]
    gate_stride: tl.tensor,
    heads: tl.tensor,
    groups: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    channels: tl.tensor,
    query_start: tl.tensor,
    key_start: tl.tensor,
    value_start: tl.tensor,
    least: tl.tensor,
    most: tl.tensor,
    rate_scale: tl.tensor,
    bound: tl.tensor,
    DELTA: tl.constexpr,
    KEYED: tl.constexpr,  # each row of a state has its own decay
    BOUNDED: tl.constexpr,  # which is at least exp(-bound)
    STEPS: tl.constexpr,  # decays depend on the token
    TILED: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    HAS_STATES: tl.constexpr,
    IS_DECODE: tl.constexpr,  # token i is the only one of sequence i
    ONE_TOKEN: tl.constexpr,  # every sequence has one token
    COUNTED: tl.constexpr,  # programs share the sequences of a plan of fixed size; else one program has one sequence
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    head, first_sequence = tl.program_id(1), tl.program_id(2)
    group = head_group(head, heads, groups, TILED)
    rows, columns = tl.arange(0, KEYS), tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    has_key, has_value = rows < key_size, columns < value_size
    mask = has_key[:, None] & has_value[None, :]
    place = rows[:, None] * value_size + columns[None, :]
    own_decay, own_bias, steps = head_steps(decay, bias, head, heads, key_size, rows, KEYED)
    own_skip = 0.0
    if HAS_SKIP:
        own_skip = tl.load(skip + head)
    mixed_keys, mixed_queries = mixed + key_start + group * key_size, mixed + query_start + group * key_size
    mixed_values, gates, out = mixed + value_start + head * value_size, gates + head, out + head * value_size
    states += head * key_size * value_size
    state_stride = heads * key_size * value_size
    wait_for_inputs()
    if ONE_TOKEN:
        token = first_sequence.to(tl.int64)
        if not IS_DECODE:
            token = tl.load(starts + first_sequence).to(tl.int64)
        state = tl.zeros((KEYS, VALUES), tl.float32)
        if HAS_STATES:
            read = tl.load(reads + first_sequence).to(tl.int64)
            state = tl.load(states + read * state_stride + place, mask=mask, other=0.0)
        key = tl.load(mixed_keys + token * channels + rows, mask=has_key, other=0.0)
        query = tl.load(mixed_queries + token * channels + rows, mask=has_key, other=0.0)
        value = tl.load(mixed_values + token * channels + columns, mask=has_value, other=0.0)
        gate = gates + token * gate_stride
        state = _advanced(
            state, key, value, gate, steps, own_decay, own_bias, least, most, rate_scale, bound, DELTA, KEYED,
            BOUNDED, STEPS,
        )  # fmt: skip
        y = tl.sum(state * query[:, None], axis=0) + own_skip * value
        tl.store(out + token * heads * value_size + columns, y, mask=has_value)
        if HAS_STATES:
            target = tl.load(writes + token).to(tl.int64)
            if target > 0:
                tl.store(states + target * state_stride + place, state, mask=mask)
    else:
        last_sequence = first_sequence + 1
        if COUNTED:
            last_sequence = tl.load(num_sequences)
        for sequence in tl.range(first_sequence, last_sequence, tl.num_programs(2), num_stages=1):
            first, last = tl.load(starts + sequence).to(tl.int64), tl.load(ends + sequence).to(tl.int64)
            state = tl.zeros((KEYS, VALUES), tl.float32)
            if HAS_STATES:
                read = tl.load(reads + sequence).to(tl.int64)
                state = tl.load(states + read * state_stride + place, mask=mask, other=0.0)
            key_rows, query_rows = mixed_keys + first * channels, mixed_queries + first * channels
            value_rows, gate_rows = mixed_values + first * channels, gates + first * gate_stride
            out_rows = out + first * heads * value_size
            for token in tl.range(0, (last - first).to(tl.int32), num_stages=STAGES):
                key = tl.load(key_rows + token * channels + rows, mask=has_key, other=0.0)
                query = tl.load(query_rows + token * channels + rows, mask=has_key, other=0.0)
                value = tl.load(value_rows + token * channels + columns, mask=has_value, other=0.0)
                gate = gate_rows + token * gate_stride
                state = _advanced(
                    state, key, value, gate, steps, own_decay, own_bias, least, most, rate_scale, bound, DELTA, KEYED,
                    BOUNDED, STEPS,
                )  # fmt: skip
                y = tl.sum(state * query[:, None], axis=0) + own_skip * value
                tl.store(out_rows + token * heads * value_size + columns, y, mask=has_value)
                if HAS_STATES:
                    target = tl.load(writes + first + token).to(tl.int64)
                    if target > 0:
                        tl.store(states + target * state_stride + place, state, mask=mask)


@triton.jit
def _finish_kernel(
    y: tl.tensor,  # f32[t, parts * size]
    x: tl.tensor,  # z in its columns from `gate_start` on
    weight: tl.tensor,  # f32[size] or f32[parts * size]
    out: tl.tensor,  # [t, parts * size]
    num_rows: tl.tensor,  # tokens * parts
    parts: tl.tensor,
    size: tl.tensor,
    x_stride: tl.tensor,
    gate_start: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,  # of the gate, in place of silu
    SHARED: tl.constexpr,  # one weight for all parts
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (columns < size)[None, :]
    part = (row % parts)[:, None] * size + columns[None, :]
    wait_for_inputs()
    value = tl.load(y + row[:, None] * size + columns[None, :], mask=mask, other=0.0)
    gate = tl.load(x + (row // parts)[:, None] * x_stride + gate_start + part, mask=mask, other=0.0).to(tl.float32)
    scale = 0.0
    if HAS_NORM:
        scale = tl.load(weight + (columns[None, :] if SHARED else part), mask=mask, other=0.0)
    value = gated_norm(value, gate, scale, size, eps, HAS_NORM, NORM_FIRST, SIGMOID)
    tl.store(out + row[:, None] * size + columns[None, :], value.to(out.dtype.element_ty), mask=mask)


def recur(x: torch.Tensor, r: Recurrence, staged: StagedStates, storage: Storage | None) -> torch.Tensor:
    """[t, out_features]"""
    if r.is_rwkv:
        return recur_rwkv(x, r, staged, storage)
    if r.only_convolves:
        out = x.new_empty((x.shape[0], r.channels))
        _convolve(x, r, staged, storage, out)
        return out
    if storage is not None and staged.is_decode and can_step(r, x):
        return row_delta(x, r, staged.reads, staged.writes, storage.convolutions[r.layer], storage.recurrent[r.layer])
    mixed = torch.empty((x.shape[0], r.channels), dtype=torch.float32, device=x.device)
    _convolve(x, r, staged, storage, mixed)
    if storage is not None and staged.is_decode and has_one_step(r, x.shape[0]):
        return delta_step(mixed, x, r, staged.reads, staged.writes, storage.recurrent[r.layer])
    return _finish(_scan(mixed, x, r, staged, storage), x, r)


def _convolve(x: torch.Tensor, r: Recurrence, staged: StagedStates, storage: Storage | None, out: torch.Tensor) -> None:
    count, is_delta = x.shape[0], r.has_delta_rule
    if not count:
        return
    if r.only_convolves:
        sizes = {"num_queries": 0, "key_start": 0, "key_size": 0, "value_start": 0, "value_size": CONV_BLOCK}
        units, block, first = triton.cdiv(r.channels, CONV_BLOCK), CONV_BLOCK, 0
    else:
        keys, inner = r.groups * r.key_size, r.heads * r.value_size
        starts = {"key_start": 0 if is_delta else inner, "value_start": 2 * keys if is_delta else 0}
        sizes = {"num_queries": r.groups, "key_size": r.key_size, "value_size": r.value_size, **starts}
        units, block = 2 * r.groups + r.heads, triton.next_power_of_2(max(r.key_size, r.value_size))
        first = 0 if is_delta else inner
    has_states = storage is not None and r.width > 1
    windows = storage.convolutions[r.layer] if storage is not None else x
    old = windows.index_select(0, staged.reads) if has_states and not staged.is_decode else windows
    tokens = max(1, CONV_SIZE // block)  # in every pass the same: the tile decides the order of sums
    _convolve_kernel[triton.cdiv(count, tokens), units](
        x, windows, old, staged.reads, staged.sequences, staged.starts, staged.writes, r.conv_weight,
        x if r.conv_bias is None else r.conv_bias, out, count, r.channels, x.stride(0), first,
        query_scale=r.key_size**-0.5 if is_delta else 1.0, eps=L2_EPS, **sizes, WIDTH=r.width, GATED=r.kind == "conv",
        PLAIN=r.kind == "lru", UNIT=is_delta, HAS_BIAS=r.conv_bias is not None, HAS_STATES=has_states,
        IS_DECODE=staged.is_decode, TOKENS=tokens, BLOCK=block, num_warps=4, **OVERLAPPED,
    )  # fmt: skip


def _scan(
    mixed: torch.Tensor, x: torch.Tensor, r: Recurrence, staged: StagedStates, storage: Storage | None
) -> torch.Tensor:
    """f32[t, heads * value_size]"""
    keys, inner = r.groups * r.key_size, r.heads * r.value_size
    new = torch.zeros if staged.has_padding else torch.empty
    out = new((x.shape[0], inner), dtype=torch.float32, device=x.device)
    gates = x[:, r.channels + inner :] if has_steps(r) else x
    columns = (0, keys, 2 * keys) if r.has_delta_rule else (inner + keys, inner, 0)  # of queries, keys and values
    spans = staged.spans
    if staged.chunks is not None and r.key_size > LARGEST_KEY:
        spans = Spans(staged.starts[:-1], staged.starts[1:], staged.reads)
    elif staged.chunks is not None:
        scan = scan_keyed_chunks if r.kind == "keyed" else scan_chunks
        scan(mixed, gates, r, staged.chunks, staged.writes, storage, out, columns)
    _scan_tokens(mixed, gates, r, spans, staged.writes, storage, out, columns, is_decode=staged.is_decode)
    return out


def _scan_tokens(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    r: Recurrence,
    spans: Spans,
    writes: torch.Tensor,
    storage: Storage | None,
    out: torch.Tensor,
    starts: tuple[int, int, int],
    *,
    is_decode: bool,
) -> None:
    is_delta, rows = r.has_delta_rule, triton.next_power_of_2(r.key_size)
    one_token = is_decode or spans.one_token
    size, warps = (DECODE_SIZE, DECODE_WARPS) if one_token else (STATE_SIZE, 1)
    columns = min(triton.next_power_of_2(r.value_size), max(8, size // rows))
    tiles = triton.cdiv(r.value_size, columns)
    grid = (tiles, r.heads, programs_of(spans, tiles * r.heads))
    if not all(grid):
        return
    least, most = (0.0, float("inf")) if is_delta else r.dt_limits
    _scan_kernel[grid](
        mixed, gates, mixed if storage is None else storage.recurrent[r.layer], spans.starts, spans.ends, spans.reads,
        spans.reads if spans.count is None else spans.count, writes, r.decay, r.bias if has_steps(r) else r.decay,
        r.decay if r.skip is None else r.skip, out, gates.stride(0), r.heads, r.groups,
        r.key_size, r.value_size, r.channels, *starts, least, most, r.rate_scale, r.decay_bound, DELTA=is_delta,
        KEYED=r.kind == "keyed", BOUNDED=r.decay_bound > 0,
        STEPS=has_steps(r), TILED=r.tiled, HAS_SKIP=r.skip is not None, HAS_STATES=storage is not None,
        IS_DECODE=is_decode, ONE_TOKEN=one_token,
        COUNTED=spans.count is not None, KEYS=rows, VALUES=columns, STAGES=STAGES, num_warps=warps, **OVERLAPPED,
    )  # fmt: skip


def _finish(y: torch.Tensor, x: torch.Tensor, r: Recurrence) -> torch.Tensor:
    out = torch.empty(y.shape, dtype=x.dtype, device=x.device)
    parts = r.heads if r.has_delta_rule else r.norm_groups
    size = y.shape[1] // parts
    block = triton.next_power_of_2(size)
    rows = max(1, 2048 // block)
    if not y.shape[0]:
        return out
    _finish_kernel[(triton.cdiv(y.shape[0] * parts, rows),)](
        y, x, y if r.norm is None else r.norm.weight, out, y.shape[0] * parts, parts, size, x.stride(0),
        r.channels if r.has_delta_rule else 0, 0.0 if r.norm is None else r.norm.eps, HAS_NORM=r.norm is not None,
        NORM_FIRST=r.norm_first or r.norm is None, SIGMOID=r.kind in ("keyed", "lightning"), SHARED=r.has_delta_rule,
        ROWS=rows, BLOCK=block, num_warps=4 if block * rows <= 4096 else 8, **OVERLAPPED,
    )  # fmt: skip
    return out
