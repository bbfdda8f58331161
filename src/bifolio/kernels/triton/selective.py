# mypy: disallow-untyped-decorators=False
"""The scans of recurrences by channel: a selective one (Mamba), with a decay for each number of a channel's state, and
linear units with gates (`lru`), with one number.

A program has a tile of channels of one sequence in registers and goes through its tokens. No tile depends on the size
of a pass, so neither do results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Recurrence, Storage
from bifolio.kernels.triton.chunked_scan import positive_step
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.scan_plan import StagedStates

CHANNELS = 64  # of a program, which is one warp
STAGES = 3  # tokens that are read ahead


@triton.jit(do_not_specialize_on_alignment=["starts", "reads", "writes"])
def _selective_kernel(
    x: tl.tensor,  # [t, 3 * channels + 2 * key_size]  z, x, dt, b, c
    states: tl.tensor,  # f32[states, key_size, channels]
    starts: tl.tensor,  # i32[s + 1]
    reads: tl.tensor,  # i32[s]
    writes: tl.tensor,  # i32[t]
    decay: tl.tensor,  # f32[key_size, channels]
    skip: tl.tensor,  # f32[channels]
    out: tl.tensor,  # [t, channels]
    x_stride: tl.tensor,
    channels: tl.tensor,
    key_size: tl.tensor,
    HAS_STATES: tl.constexpr,
    IS_DECODE: tl.constexpr,  # token i is the only one of sequence i
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    sequence = tl.program_id(1)
    keys, columns = tl.arange(0, KEYS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    has_key, has_column = keys < key_size, columns < channels
    mask = has_key[:, None] & has_column[None, :]
    place = keys[:, None] * channels + columns[None, :]
    own_decay = tl.load(decay + place, mask=mask, other=0.0)
    own_skip = tl.load(skip + columns, mask=has_column, other=0.0)
    wait_for_inputs()
    first = sequence.to(tl.int64)
    count = 1
    if not IS_DECODE:
        first = tl.load(starts + sequence).to(tl.int64)
        count = tl.load(starts + sequence + 1) - first.to(tl.int32)
    state = tl.zeros((KEYS, BLOCK), tl.float32)
    if HAS_STATES:
        read = tl.load(reads + sequence).to(tl.int64)
        state = tl.load(states + read * key_size * channels + place, mask=mask, other=0.0)
    for index in tl.range(0, count, num_stages=STAGES):
        token = first + index
        row = x + token * x_stride
        gate = tl.load(row + columns, mask=has_column, other=0.0).to(tl.float32)
        value = tl.load(row + channels + columns, mask=has_column, other=0.0).to(tl.float32)
        step = tl.load(row + 2 * channels + columns, mask=has_column, other=0.0).to(tl.float32)
        key = tl.load(row + 3 * channels + keys, mask=has_key, other=0.0).to(tl.float32)
        query = tl.load(row + 3 * channels + key_size + keys, mask=has_key, other=0.0).to(tl.float32)
        step = positive_step(step, 0.0, float("inf"))
        state = state * tl.exp(step[None, :] * own_decay) + key[:, None] * (step * value)[None, :]
        y = tl.sum(state * query[:, None], axis=0) + own_skip * value
        y = y * gate / (1.0 + tl.exp(-gate))
        tl.store(out + token * channels + columns, y.to(out.dtype.element_ty), mask=has_column)
        if HAS_STATES:
            target = tl.load(writes + token).to(tl.int64)
            if target > 0:
                tl.store(states + target * key_size * channels + place, state, mask=mask)


@triton.jit
def _below_one(x: tl.tensor) -> tl.tensor:
    """1 - exp(x) for x <= 0, without cancellation near 0."""
    near = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6)))))
    return tl.where(x > -0.25, near, 1.0 - tl.exp(x))


@triton.jit(do_not_specialize_on_alignment=["starts", "reads", "writes"])
def _unit_kernel(
    x: tl.tensor,  # [t, 3 * channels]  x, r, i
    states: tl.tensor,  # f32[states, channels]
    starts: tl.tensor,  # i32[s + 1]
    reads: tl.tensor,  # i32[s]
    writes: tl.tensor,  # i32[t]
    decay: tl.tensor,  # f32[channels]
    bias: tl.tensor,  # f32[2 * channels]
    out: tl.tensor,  # [t, channels]
    x_stride: tl.tensor,
    channels: tl.tensor,
    HAS_STATES: tl.constexpr,
    IS_DECODE: tl.constexpr,  # token i is the only one of sequence i
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    sequence = tl.program_id(1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < channels
    own_decay = tl.load(decay + columns, mask=mask, other=0.0)
    recurrent_bias = tl.load(bias + columns, mask=mask, other=0.0)
    entering_bias = tl.load(bias + channels + columns, mask=mask, other=0.0)
    wait_for_inputs()
    first = sequence.to(tl.int64)
    count = 1
    if not IS_DECODE:
        first = tl.load(starts + sequence).to(tl.int64)
        count = tl.load(starts + sequence + 1) - first.to(tl.int32)
    state = tl.zeros((BLOCK,), tl.float32)
    begins = sequence >= 0
    if HAS_STATES:
        read = tl.load(reads + sequence).to(tl.int64)
        begins = read <= 0
        state = tl.load(states + read * channels + columns, mask=mask, other=0.0)
    for index in tl.range(0, count, num_stages=STAGES):
        token = first + index
        row = x + token * x_stride + columns
        value = tl.load(row, mask=mask, other=0.0).to(tl.float32)
        recurrent = tl.load(row + channels, mask=mask, other=0.0).to(tl.float32) + recurrent_bias
        entering = tl.load(row + 2 * channels, mask=mask, other=0.0).to(tl.float32) + entering_bias
        step = own_decay / (1.0 + tl.exp(-recurrent))
        factor = tl.where(begins & (index == 0), 1.0, tl.sqrt(_below_one(2.0 * step)))
        state = tl.exp(step) * state + factor * value / (1.0 + tl.exp(-entering))
        tl.store(out + token * channels + columns, state.to(out.dtype.element_ty), mask=mask)
        if HAS_STATES:
            target = tl.load(writes + token).to(tl.int64)
            if target > 0:
                tl.store(states + target * channels + columns, state, mask=mask)


def scan_channels(x: torch.Tensor, r: Recurrence, staged: StagedStates, storage: Storage | None) -> torch.Tensor:
    """[t, channels]"""
    new = torch.zeros if staged.has_padding else torch.empty
    out = new((x.shape[0], r.channels), dtype=x.dtype, device=x.device)
    sequences = len(staged.reads)
    if not x.shape[0] or not sequences:
        return out
    if r.kind == "lru":
        _unit_kernel[triton.cdiv(r.channels, CHANNELS), sequences](
            x, x if storage is None else storage.recurrent[r.layer], staged.starts, staged.reads, staged.writes,
            r.decay, r.bias, out, x.stride(0), r.channels, HAS_STATES=storage is not None,
            IS_DECODE=staged.is_decode, BLOCK=CHANNELS, STAGES=STAGES, num_warps=1, **OVERLAPPED,
        )  # fmt: skip
        return out
    _selective_kernel[triton.cdiv(r.channels, CHANNELS), sequences](
        x, x if storage is None else storage.recurrent[r.layer], staged.starts, staged.reads, staged.writes,
        r.decay, r.skip, out, x.stride(0), r.channels, r.key_size, HAS_STATES=storage is not None,
        IS_DECODE=staged.is_decode, KEYS=triton.next_power_of_2(r.key_size), BLOCK=CHANNELS, STAGES=STAGES,
        num_warps=1, **OVERLAPPED,
    )  # fmt: skip
    return out
