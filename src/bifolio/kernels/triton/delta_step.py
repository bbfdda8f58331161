# mypy: disallow-untyped-decorators=False
"""A decode step of a gated delta net behind its convolution, for few sequences: scan, gate and norm in one kernel.

A program has the whole state of one head of one sequence in registers, so that the head's norm needs no other program;
for many sequences smaller programs read the states faster. With the decayed state S, the change u of the token's key k
and its query q, both sums over S are taken at once:

    u = beta (v - k^T S)        y = q^T S + (q . k) u        S_new = S + k u^T

The state and the gates are read before the convolution has ended: it uses neither, and the product that computed the
gates is two launches earlier (`kernels.triton.pdl`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Recurrence
from bifolio.kernels.triton.chunked_scan import bounded_step, head_group, positive_step
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs

LARGEST_STATE = 128 * 128  # numbers of a head's state that fit in the registers of a program
NUMBERS_PER_WARP = 4096
MOST_SEQUENCES = 8


@triton.jit
def gated_norm(
    value: tl.tensor,  # f32[rows, size]
    gate: tl.tensor,  # f32[rows, size]
    weight: tl.tensor,  # f32[rows, size]
    size: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr,
) -> tl.tensor:
    """RMS norm and silu(gate), or sigmoid(gate), in either order."""
    gate = (1.0 if SIGMOID else gate) / (1.0 + tl.exp(-gate))
    if not NORM_FIRST:
        value *= gate
    if HAS_NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / size + eps)
        value = value * inverse[:, None] * weight
    if NORM_FIRST:
        value *= gate
    return value


@triton.jit
def head_steps(
    decay: tl.tensor,
    bias: tl.tensor,
    head: tl.tensor,
    heads: tl.tensor,
    key_size: tl.tensor,
    rows: tl.tensor,
    KEYED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The decay of a head, its bias, and where its a lies behind its beta: with KEYED of each row of its state.

    Rows behind the last key, which are empty, read the values of the first one.
    """
    place, steps = head, heads
    if KEYED:
        place = head * key_size + tl.where(rows < key_size, rows, 0)
        steps = heads - head + place
    return tl.load(decay + head), tl.load(bias + place), steps


@triton.jit(do_not_specialize_on_alignment=["reads", "writes"])
def _delta_step_kernel(
    mixed: tl.tensor,  # f32[s, channels]  queries, keys and values
    x: tl.tensor,  # [s, in_features]  z, beta and a in its columns from `channels` on
    states: tl.tensor,  # f32[states, heads, key_size, value_size]
    reads: tl.tensor,  # i32[s]
    writes: tl.tensor,  # i32[s]
    decay: tl.tensor,  # f32[heads]
    bias: tl.tensor,
    weight: tl.tensor,  # f32[value_size]
    out: tl.tensor,  # [s, heads * value_size]
    x_stride: tl.tensor,
    heads: tl.tensor,
    groups: tl.tensor,
    key_size: tl.tensor,
    value_size: tl.tensor,
    channels: tl.tensor,
    eps: tl.tensor,
    rate_scale: tl.tensor,
    bound: tl.tensor,
    KEYED: tl.constexpr,
    BOUNDED: tl.constexpr,
    TILED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, columns = tl.arange(0, KEYS), tl.arange(0, VALUES)
    has_key, has_value = rows < key_size, columns < value_size
    mask = has_key[:, None] & has_value[None, :]
    place = head * key_size * value_size + rows[:, None] * value_size + columns[None, :]
    stride = heads * key_size * value_size
    own_decay, own_bias, steps = head_steps(decay, bias, head, heads, key_size, rows, KEYED)
    scale = 0.0
    if HAS_NORM:
        scale = tl.load(weight + columns, mask=has_value, other=0.0)[None, :]
    own = x + sequence * x_stride + channels
    state = tl.load(states + tl.load(reads + sequence).to(tl.int64) * stride + place, mask=mask, other=0.0)
    target = tl.load(writes + sequence).to(tl.int64)
    gate = tl.load(own + head * value_size + columns, mask=has_value, other=0.0).to(tl.float32)
    rates = own + heads * value_size + head
    rate = rate_scale / (1.0 + tl.exp(-tl.load(rates).to(tl.float32)))
    step = tl.load(rates + steps).to(tl.float32) + own_bias
    if BOUNDED:
        kept = tl.exp(bounded_step(step, own_decay, bound))
    else:
        kept = tl.exp(positive_step(step, 0.0, float("inf")) * own_decay)
    if KEYED:
        kept = kept[:, None]
    state *= kept
    wait_for_inputs()
    token = mixed + sequence * channels
    group = head_group(head, heads, groups, TILED)
    query = tl.load(token + group * key_size + rows, mask=has_key, other=0.0)
    key = tl.load(token + (groups + group) * key_size + rows, mask=has_key, other=0.0)
    value = tl.load(token + 2 * groups * key_size + head * value_size + columns, mask=has_value, other=0.0)
    change = rate * (value - tl.sum(state * key[:, None], axis=0))
    y = tl.sum(state * query[:, None], axis=0) + tl.sum(query * key, axis=0) * change
    if target > 0:
        tl.store(states + target * stride + place, state + key[:, None] * change[None, :], mask=mask)
    y = gated_norm(y[None, :], gate[None, :], scale, value_size, eps, HAS_NORM, NORM_FIRST, KEYED)
    y = tl.sum(y, axis=0)
    tl.store(out + (sequence * heads + head) * value_size + columns, y.to(out.dtype.element_ty), mask=has_value)


def has_one_step(r: Recurrence, num_sequences: int) -> bool:
    """Whether `delta_step` computes a decode step of this recurrence."""
    if not r.has_delta_rule or num_sequences > MOST_SEQUENCES:
        return False
    size: int = triton.next_power_of_2(r.key_size) * triton.next_power_of_2(r.value_size)
    return size <= LARGEST_STATE


def delta_step(
    mixed: torch.Tensor,  # f32[s, channels]  of the convolution
    x: torch.Tensor,  # [s, in_features]
    r: Recurrence,
    reads: torch.Tensor,  # i32[s]
    writes: torch.Tensor,  # i32[s]
    states: torch.Tensor,  # f32[states, heads, key_size, value_size]
) -> torch.Tensor:
    """[s, heads * value_size]; the states are replaced."""
    count, keys, values = x.shape[0], triton.next_power_of_2(r.key_size), triton.next_power_of_2(r.value_size)
    out = torch.empty((count, r.heads * r.value_size), dtype=x.dtype, device=x.device)
    if not count:
        return out
    _delta_step_kernel[(r.heads, count)](
        mixed, x, states, reads, writes, r.decay, r.bias, r.bias if r.norm is None else r.norm.weight, out, x.stride(0),
        r.heads, r.groups, r.key_size, r.value_size, r.channels, 0.0 if r.norm is None else r.norm.eps,
        r.rate_scale, r.decay_bound, KEYED=r.kind == "keyed", BOUNDED=r.decay_bound > 0, TILED=r.tiled,
        HAS_NORM=r.norm is not None, NORM_FIRST=r.norm_first or r.norm is None, KEYS=keys, VALUES=values,
        num_warps=max(1, keys * values // NUMBERS_PER_WARP), **OVERLAPPED,
    )  # fmt: skip
    return out
