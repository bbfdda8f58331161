# mypy: disallow-untyped-decorators=False
"""Products of one token and its experts in MXFP4 (GEMV): the layout of `mxfp4`, x and sums in f32.

A tile is [blocks, 8 rows, 4 words]. The elements of x that belong to code k of the four words are neighbours, so a
thread multiplies its words by 8 vectors of x. The tiles of x have the same shape: others would be rearranged through
shared memory in every step. The scale of a block is applied once, to the sum of its products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bifolio.kernels.triton.mxfp4 import LIFT, LIFTED, load_powers, load_words, number
from bifolio.kernels.triton.norm import gated
from bifolio.kernels.triton.pdl import wait_for_inputs


@triton.jit
def up_words_kernel(
    x: tl.tensor,  # f32[tokens, depth]
    words: tl.tensor,  # of `experts * 2 * outputs` rows: gate first, then up
    scales: tl.tensor,
    bias: tl.tensor,  # [experts, 2 * outputs]
    experts: tl.tensor,  # i32[pairs]
    out: tl.tensor,  # f32[pairs, outputs]  times LIFT
    num_outputs: tl.tensor,  # a multiple of 8
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCKS: tl.constexpr,  # of 32 columns, in one step
    UNROLLED: tl.constexpr,  # steps whose loads are in flight together
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """act(gate x) * (up x) of one pair, 8 outputs."""
    COUNT: tl.constexpr = DEPTH // 32
    pair, member = tl.program_id(1), tl.arange(0, 8)
    sums = tl.zeros([BLOCKS, 8, 4], tl.float32)
    up_sums = tl.zeros([BLOCKS, 8, 4], tl.float32)
    wait_for_inputs()
    first_row = tl.load(experts + pair).to(tl.int64) * (2 * num_outputs) + tl.program_id(0) * 8
    source = x + (pair // TOP_K).to(tl.int64) * DEPTH
    for start in tl.range(0, COUNT, BLOCKS, num_stages=1, loop_unroll_factor=UNROLLED):
        block = (start + tl.arange(0, BLOCKS))[:, None, None]
        inside = (block < COUNT) & (member >= 0)[None, :, None]
        place = first_row * COUNT + block * 8 + member[None, :, None]
        gate = load_words(words, place, inside)
        up = load_words(words, place + num_outputs * COUNT, inside)
        power = load_powers(scales, place, inside, LIFTED)
        up_power = load_powers(scales, place + num_outputs * COUNT, inside, LIFTED)
        part = tl.zeros([BLOCKS, 8, 4], tl.float32)
        up_part = tl.zeros([BLOCKS, 8, 4], tl.float32)
        column = block * 32 + (member * 0)[None, :, None] + tl.arange(0, 4)[None, None, :]
        for k in tl.static_range(8):
            values = tl.load(source + column + 4 * k, mask=inside, other=0.0) * LIFT
            part += number(gate, k) * values
            up_part += number(up, k) * values
        sums += part * power
        up_sums += up_part * up_power
    gate_total, up_total = tl.sum(tl.sum(sums, axis=2), axis=0), tl.sum(tl.sum(up_sums, axis=2), axis=0)
    if HAS_BIAS:
        gate_total += tl.load(bias + first_row + member).to(tl.float32)
        up_total += tl.load(bias + first_row + num_outputs + member).to(tl.float32)
    result = gated(gate_total, up_total, ACTIVATION) * LIFT
    tl.store(out + pair.to(tl.int64) * num_outputs + tl.program_id(0) * 8 + member, result)


@triton.jit
def down_words_kernel(
    x: tl.tensor,  # f32[pairs, depth]  times LIFT
    words: tl.tensor,  # of `experts * outputs` rows
    scales: tl.tensor,
    bias: tl.tensor,  # [experts, outputs]
    residual: tl.tensor,  # [tokens, outputs]
    experts: tl.tensor,  # i32[pairs]
    shares: tl.tensor,  # f32[pairs]
    out: tl.tensor,  # [tokens, outputs]
    num_outputs: tl.tensor,  # a multiple of 8
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # power of 2, at least TOP_K
    BLOCKS: tl.constexpr,
    UNROLLED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """The weighted sum of a token's experts, 8 outputs: a tile is [choices, blocks, 8 rows, 4 words]."""
    COUNT: tl.constexpr = DEPTH // 32
    token, choice, member = tl.program_id(1).to(tl.int64), tl.arange(0, CHOICES), tl.arange(0, 8)
    is_choice = choice < TOP_K
    sums = tl.zeros([CHOICES, BLOCKS, 8, 4], tl.float32)
    wait_for_inputs()
    pair = token * TOP_K + choice
    expert = tl.load(experts + pair, mask=is_choice, other=0).to(tl.int64)
    share = tl.load(shares + pair, mask=is_choice, other=0.0)
    first_row = expert * num_outputs + tl.program_id(0) * 8
    for start in tl.range(0, COUNT, BLOCKS, num_stages=1, loop_unroll_factor=UNROLLED):
        block = (start + tl.arange(0, BLOCKS))[None, :, None]
        inside = is_choice[:, None, None] & (block < COUNT) & (member >= 0)[None, None, :]
        place = first_row[:, None, None] * COUNT + block * 8 + member[None, None, :]
        codes = load_words(words, tl.expand_dims(place, 3), tl.expand_dims(inside, 3))
        power = load_powers(scales, tl.expand_dims(place, 3), tl.expand_dims(inside, 3), LIFTED)
        part = tl.zeros([CHOICES, BLOCKS, 8, 4], tl.float32)
        column = pair[:, None, None] * DEPTH + block * 32 + (member * 0)[None, None, :]
        column = tl.expand_dims(column, 3) + tl.arange(0, 4)[None, None, None, :]
        for k in tl.static_range(8):
            part += number(codes, k) * tl.load(x + column + 4 * k, mask=tl.expand_dims(inside, 3), other=0.0)
        sums += part * power
    result = tl.sum(tl.sum(sums, axis=3), axis=1)
    if HAS_BIAS:
        result += tl.load(
            bias + first_row[:, None] + member[None, :], mask=is_choice[:, None] & (member >= 0)[None, :], other=0.0
        ).to(tl.float32)
    total = tl.sum(result * share[:, None], axis=0)
    place = token * num_outputs + tl.program_id(0) * 8 + member
    if HAS_RESIDUAL:
        total += tl.load(residual + place).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty))
