# mypy: disallow-untyped-decorators=False
"""Products of one token and its experts in MXFP4 (GEMV): the layout of `mxfp4`, x and sums in f32.

A tile is [rows, blocks, 4 words], one row for each warp, a block for each thread. Code k of the four words of a block
belongs to four neighbouring elements of x. In the order of x

    element 4 k + j of block b at (k, b, j)

the threads of a warp read neighbours for every k. All tiles have one shape, x included: others would be rearranged
through shared memory in every step. Each program has two tiles of weights, which use the same x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bifolio.kernels.triton.mxfp4 import LIFT, LIFTED, load_powers, load_words, number
from bifolio.kernels.triton.norm import gated
from bifolio.kernels.triton.pdl import wait_for_inputs


@triton.jit
def _spread(column: tl.tensor, DEPTH: tl.constexpr) -> tl.tensor:
    """The place of an element in the order (k, block, j)."""
    return column % 32 // 4 * (DEPTH // 8) + column // 32 * 4 + column % 4


@triton.jit
def spread_kernel(
    x: tl.tensor,  # [tokens, depth]
    norm_weight: tl.tensor,  # [depth]
    out: tl.tensor,  # f32[tokens, depth]  times LIFT, in the order (k, block, j)
    eps: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> None:
    """The norm of each token, if there is one."""
    column = tl.arange(0, BLOCK)
    inside = column < DEPTH
    wait_for_inputs()
    values = tl.load(x + tl.program_id(0) * DEPTH + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / DEPTH + eps)
        values = values * factor * tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + tl.program_id(0) * DEPTH + _spread(column, DEPTH), values * LIFT, mask=inside)


@triton.jit
def _multiply_rows(
    words: tl.tensor,
    scales: tl.tensor,
    x: tl.tensor,  # pointers [rows, 1, 1] to the x of each row
    row: tl.tensor,  # i64[rows]  of the first tile
    second: tl.tensor,  # i64[rows]  of the second one
    exists: tl.tensor,  # bool[rows]
    second_exists: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCKS: tl.constexpr,  # of 32 columns, in one step
    UNROLLED: tl.constexpr,  # steps whose loads are in flight together
) -> tl.tensor:
    """(f32[rows], f32[rows]): the products of both tiles and x."""
    ROWS: tl.constexpr = row.shape[0]
    COUNT: tl.constexpr = DEPTH // 32
    sums = tl.zeros([ROWS, BLOCKS, 4], tl.float32)
    second_sums = tl.zeros([ROWS, BLOCKS, 4], tl.float32)
    for start in tl.range(0, COUNT, BLOCKS, num_stages=1, loop_unroll_factor=UNROLLED):
        block = start + tl.arange(0, BLOCKS)
        inside = exists[:, None] & (block < COUNT)[None, :]
        second_inside = second_exists[:, None] & (block < COUNT)[None, :]
        place = row[:, None] * COUNT + block[None, :]
        second_place = second[:, None] * COUNT + block[None, :]
        codes = load_words(words, place[:, :, None], inside[:, :, None])
        second_codes = load_words(words, second_place[:, :, None], second_inside[:, :, None])
        power = load_powers(scales, place, inside, LIFTED)
        second_power = load_powers(scales, second_place, second_inside, LIFTED)
        part = tl.zeros([ROWS, BLOCKS, 4], tl.float32)
        second_part = tl.zeros([ROWS, BLOCKS, 4], tl.float32)
        source = x + (block[None, :, None] * 4 + tl.arange(0, 4)[None, None, :])
        for k in tl.static_range(8):
            values = tl.load(source + k * (DEPTH // 8), mask=inside[:, :, None], other=0.0)
            part += number(codes, k) * values
            second_part += number(second_codes, k) * values
        sums += part * power[:, :, None]
        second_sums += second_part * second_power[:, :, None]
    return tl.sum(tl.sum(sums, axis=2), axis=1), tl.sum(tl.sum(second_sums, axis=2), axis=1)


@triton.jit
def up_words_kernel(
    x: tl.tensor,  # f32[tokens, depth]  of `spread_kernel`
    words: tl.tensor,  # of `experts * 2 * outputs` rows: gate first, then up
    scales: tl.tensor,
    bias: tl.tensor,  # [experts, 2 * outputs]
    experts: tl.tensor,  # i32[pairs]
    out: tl.tensor,  # f32[pairs, outputs]  times LIFT, in the order (k, block, j)
    num_outputs: tl.tensor,
    DEPTH: tl.constexpr,
    NEXT_DEPTH: tl.constexpr,  # num_outputs
    TOP_K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNROLLED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """act(gate x) * (up x) of one pair."""
    pair = tl.program_id(1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = output < num_outputs
    wait_for_inputs()
    row = tl.load(experts + pair).to(tl.int64) * (2 * num_outputs) + output
    source = x + ((pair // TOP_K).to(tl.int64) * DEPTH + (output * 0)[:, None, None])
    gate, up = _multiply_rows(
        words, scales, source, row, row + num_outputs, exists, exists, DEPTH, BLOCKS, UNROLLED
    )  # fmt: skip
    if HAS_BIAS:
        gate += tl.load(bias + row, mask=exists, other=0.0).to(tl.float32)
        up += tl.load(bias + row + num_outputs, mask=exists, other=0.0).to(tl.float32)
    result = gated(gate, up, ACTIVATION) * LIFT
    tl.store(out + pair.to(tl.int64) * NEXT_DEPTH + _spread(output, NEXT_DEPTH), result, mask=exists)


@triton.jit
def down_words_kernel(
    x: tl.tensor,  # f32[pairs, depth]  times LIFT, in the order (k, block, j)
    words: tl.tensor,  # of `experts * outputs` rows
    scales: tl.tensor,
    bias: tl.tensor,  # [experts, outputs]
    residual: tl.tensor,  # [tokens, outputs]
    experts: tl.tensor,  # i32[pairs]
    shares: tl.tensor,  # f32[pairs]
    out: tl.tensor,  # [tokens, outputs]
    num_outputs: tl.tensor,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # power of 2, at least TOP_K
    BLOCKS: tl.constexpr,
    UNROLLED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """Two outputs of the weighted sum of a token's experts: the rows of a tile are those of all experts."""
    token, choice = tl.program_id(1).to(tl.int64), tl.arange(0, CHOICES)
    output = tl.program_id(0) * 2
    is_choice = choice < TOP_K
    wait_for_inputs()
    pair = token * TOP_K + choice
    expert = tl.load(experts + pair, mask=is_choice, other=0).to(tl.int64)
    share = tl.load(shares + pair, mask=is_choice, other=0.0)
    row = expert * num_outputs + output
    has_next = is_choice & (choice * 0 + output + 1 < num_outputs)
    first, second = _multiply_rows(
        words, scales, x + (pair * DEPTH)[:, None, None], row, row + 1, is_choice, has_next, DEPTH, BLOCKS, UNROLLED
    )  # fmt: skip
    if HAS_BIAS:
        first += tl.load(bias + row, mask=is_choice, other=0.0).to(tl.float32)
        second += tl.load(bias + row + 1, mask=has_next, other=0.0).to(tl.float32)
    total, next_total = tl.sum(first * share, axis=0), tl.sum(second * share, axis=0)
    place = token * num_outputs + output
    if HAS_RESIDUAL:
        total += tl.load(residual + place).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty))
    if output + 1 < num_outputs:
        if HAS_RESIDUAL:
            next_total += tl.load(residual + place + 1).to(tl.float32)
        tl.store(out + place + 1, next_total.to(out.dtype.element_ty))
