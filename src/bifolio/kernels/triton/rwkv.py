# mypy: disallow-untyped-decorators=False
"""The two recurrences of a layer of RWKV-7 on a GPU (`kernels.rwkv` defines them), one kernel each.

    shift   (tokens, channels)    mixes with the token before; writes the windows
    rwkv    (heads, sequences)    the state of a head in registers, token by token; norm, bonus and gate of its outputs

No tile depends on the size of a pass, so neither do results. Outside deterministic mode prompts are scanned in chunks
(`kernels.triton.rwkv_chunks`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Recurrence, Storage
from bifolio.kernels.rwkv import LEAST_LENGTH, SLOWEST
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.rwkv_chunks import has_chunks, logistic, scan_rwkv_chunks
from bifolio.kernels.triton.scan_plan import Spans, StagedStates

CHANNELS = 256  # of a program of a shift
NUMBERS_PER_WARP = 1024  # of a state


@triton.jit
def _shift_kernel(
    x: tl.tensor,  # [t, channels]
    windows: tl.tensor,  # f32[states, 1, window]
    old: tl.tensor,  # f32[s, 1, window]  those that the sequences continue; if IS_DECODE all windows
    reads: tl.tensor,  # i32[s]
    sequences: tl.tensor,  # i32[t]
    starts: tl.tensor,  # i32[s + 1]
    writes: tl.tensor,  # i32[t]
    factors: tl.tensor,  # f32[MIXES, channels]
    out: tl.tensor,  # [t, MIXES * channels]
    channels: tl.tensor,
    x_stride: tl.tensor,
    window: tl.tensor,
    first: tl.tensor,  # column of a window
    MIXES: tl.constexpr,
    HAS_STATES: tl.constexpr,
    IS_DECODE: tl.constexpr,  # token i is the only one of sequence i
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = lanes < channels
    wait_for_inputs()
    if IS_DECODE:
        start = token
        source = token
        if HAS_STATES:
            source = tl.load(reads + token).to(tl.int64)
    else:
        source = tl.load(sequences + token).to(tl.int64)
        start = tl.load(starts + source).to(tl.int64)
    own = tl.load(x + token * x_stride + lanes, mask=used, other=0.0).to(tl.float32)
    since = tl.zeros((BLOCK,), tl.int64) + (token - start)
    earlier = used & (since > 0)
    before = tl.load(x + (token - 1) * x_stride + lanes, mask=earlier, other=0.0).to(tl.float32)
    if HAS_STATES:
        stored = used & (since == 0)
        before += tl.load(old + source * window + first + lanes, mask=stored, other=0.0)
        target = tl.load(writes + token).to(tl.int64)
        if target > 0:
            tl.store(windows + target * window + first + lanes, own, mask=used)
    for mix in tl.static_range(MIXES):
        factor = tl.load(factors + mix * channels + lanes, mask=used, other=0.0)
        y = own + factor * (before - own)
        tl.store(out + (token * MIXES + mix) * channels + lanes, y.to(out.dtype.element_ty), mask=used)


@triton.jit(do_not_specialize_on_alignment=["starts", "ends", "reads", "writes"])
def _rwkv_kernel(
    x: tl.tensor,  # [t, in_features]  r, w, k, v, a, g, and m and f if MIXES_VALUES
    states: tl.tensor,  # f32[states, heads, key_size, value_size]
    starts: tl.tensor,  # i32[s]
    ends: tl.tensor,  # i32[s]
    reads: tl.tensor,  # i32[s]
    writes: tl.tensor,  # i32[t]
    factors: tl.tensor,  # f32[3, heads * key_size]
    weight: tl.tensor,  # f32[heads * value_size]
    bias: tl.tensor,
    out: tl.tensor,  # [t, heads * value_size]
    x_stride: tl.tensor,
    heads: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    eps: tl.tensor,
    slowest: tl.tensor,
    least_length: tl.tensor,
    MIXES_VALUES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATES: tl.constexpr,
    IS_DECODE: tl.constexpr,  # token i is the only one of sequence i
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    head, sequence = tl.program_id(0), tl.program_id(1)
    rows, columns = tl.arange(0, KEYS), tl.arange(0, VALUES)
    has_key, has_value = rows < key_size, columns < value_size
    mask = has_key[:, None] & has_value[None, :]
    keys, inner = heads * key_size, heads * value_size
    key_place, value_place = head * key_size + rows, head * value_size + columns
    of_removed = tl.load(factors + key_place, mask=has_key, other=0.0)
    of_key = tl.load(factors + keys + key_place, mask=has_key, other=0.0)
    of_bonus = tl.load(factors + 2 * keys + key_place, mask=has_key, other=0.0)
    scale, shift = 1.0, 0.0
    if HAS_NORM:
        scale = tl.load(weight + value_place, mask=has_value, other=0.0)
    if HAS_BIAS:
        shift = tl.load(bias + value_place, mask=has_value, other=0.0)
    states += head * key_size * value_size
    state_stride = heads * key_size * value_size
    place = rows[:, None] * value_size + columns[None, :]
    wait_for_inputs()
    first = sequence.to(tl.int64)
    count = 1
    if not IS_DECODE:
        first = tl.load(starts + sequence).to(tl.int64)
        count = tl.load(ends + sequence) - first.to(tl.int32)
    state = tl.zeros((KEYS, VALUES), tl.float32)
    if HAS_STATES:
        read = tl.load(reads + sequence).to(tl.int64)
        state = tl.load(states + read * state_stride + place, mask=mask, other=0.0)
    for index in tl.range(0, count):
        token = first + index
        own_keys, own_values = x + token * x_stride + key_place, x + token * x_stride + value_place
        query = tl.load(own_keys, mask=has_key, other=0.0).to(tl.float32)
        decay = tl.load(own_keys + keys, mask=has_key, other=0.0).to(tl.float32)
        key = tl.load(own_keys + 2 * keys, mask=has_key, other=0.0).to(tl.float32)
        value = tl.load(own_values + 3 * keys, mask=has_value, other=0.0).to(tl.float32)
        rate = logistic(tl.load(own_keys + 3 * keys + inner, mask=has_key, other=0.0).to(tl.float32))
        gate = tl.load(own_values + 4 * keys + inner, mask=has_value, other=0.0).to(tl.float32)
        if MIXES_VALUES:
            amount = tl.load(own_values + 4 * keys + 2 * inner, mask=has_value, other=0.0).to(tl.float32)
            of_first = tl.load(own_values + 4 * keys + 3 * inner, mask=has_value, other=0.0).to(tl.float32)
            value += logistic(amount) * (of_first - value)
        removed = key * of_removed
        removed /= tl.maximum(tl.sqrt(tl.sum(removed * removed, axis=0)), least_length)
        key = key * (1.0 + (rate - 1.0) * of_key)
        known = tl.sum(state * removed[:, None], axis=0)
        state *= tl.exp(slowest * logistic(decay))[:, None]
        state += key[:, None] * value[None, :] - (rate * removed)[:, None] * known[None, :]
        y = tl.sum(state * query[:, None], axis=0)
        if HAS_NORM:
            y = tl.where(has_value, y - tl.sum(y, axis=0) / value_size, 0.0)
            y = y / tl.sqrt(tl.sum(y * y, axis=0) / value_size + eps) * scale + shift
        y = (y + tl.sum(query * key * of_bonus, axis=0) * value) * gate
        tl.store(out + token * inner + value_place, y.to(out.dtype.element_ty), mask=has_value)
        if HAS_STATES:
            target = tl.load(writes + token).to(tl.int64)
            if target > 0:
                tl.store(states + target * state_stride + place, state, mask=mask)


def recur_rwkv(x: torch.Tensor, r: Recurrence, staged: StagedStates, storage: Storage | None) -> torch.Tensor:
    """[t, out_features]"""
    new = torch.zeros if staged.has_padding else torch.empty
    out = new((x.shape[0], r.out_features), dtype=x.dtype, device=x.device)
    if not x.shape[0] or not len(staged.reads):
        return out
    if r.kind == "shift":
        _shift(x, r, staged, storage, out)
        return out
    spans = staged.spans
    if staged.chunks is not None and has_chunks(r):
        scan_rwkv_chunks(x, r, staged.chunks, staged.writes, storage, out)
    elif staged.chunks is not None:
        spans = Spans(staged.starts[:-1], staged.starts[1:], staged.reads)
    if len(spans.reads):
        _scan_tokens(x, r, staged, spans, storage, out)
    return out


def _scan_tokens(
    x: torch.Tensor, r: Recurrence, staged: StagedStates, spans: Spans, storage: Storage | None, out: torch.Tensor
) -> None:
    keys, values = triton.next_power_of_2(r.key_size), triton.next_power_of_2(r.value_size)
    norm = r.norm
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    _rwkv_kernel[r.heads, len(spans.reads)](
        x, x if storage is None else storage.recurrent[r.layer], spans.starts, spans.ends, spans.reads, staged.writes,
        r.factors,
        r.factors if weight is None else weight, r.factors if bias is None else bias, out, x.stride(0), r.heads,
        r.key_size, r.value_size, 0.0 if norm is None else norm.eps, SLOWEST, LEAST_LENGTH,
        MIXES_VALUES=r.mixes_values, HAS_NORM=weight is not None, HAS_BIAS=bias is not None,
        HAS_STATES=storage is not None, IS_DECODE=staged.is_decode, KEYS=keys, VALUES=values,
        num_warps=max(1, min(8, keys * values // NUMBERS_PER_WARP)), **OVERLAPPED,
    )  # fmt: skip


def _shift(x: torch.Tensor, r: Recurrence, staged: StagedStates, storage: Storage | None, out: torch.Tensor) -> None:
    windows = x if storage is None else storage.convolutions[r.layer]
    old = windows if storage is None or staged.is_decode else windows.index_select(0, staged.reads)
    _shift_kernel[x.shape[0], triton.cdiv(r.channels, CHANNELS)](
        x, windows, old, staged.reads, staged.sequences, staged.starts, staged.writes, r.factors, out, r.channels,
        x.stride(0), r.window, r.column, MIXES=r.out_features // r.channels, HAS_STATES=storage is not None,
        IS_DECODE=staged.is_decode, BLOCK=CHANNELS, num_warps=1, **OVERLAPPED,
    )  # fmt: skip
