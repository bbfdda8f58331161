# mypy: disallow-untyped-decorators=False
"""Products of experts: dense weights (KIND -1), MXFP4 in words (KIND 3), or blocks (KIND as in `quantised_kernels`).

    one token      a program reads a few rows of one expert (GEMV); the weighted sum over the token's experts is part
                   of the second product
    many tokens    a program multiplies the tile of one expert by tensor cores; another kernel adds the outputs of a
                   token's experts

The weight is a stack [experts * outputs, depth]; gate and up of an expert are [2 * outputs, depth], gate first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bifolio.kernels.triton.mxfp4 import LIFT, LIFTED, dense_tile, load_powers, load_words, unpack_words
from bifolio.kernels.triton.norm import activate, gated
from bifolio.kernels.triton.pdl import wait_for_inputs
from bifolio.kernels.triton.quantised_kernels import dot_blocks, load_codes, load_factors, multiply_codes
from bifolio.kernels.triton.tma import load_tile


@triton.jit
def _columns(start: tl.tensor, KIND: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """The columns of x that a step reads: [BLOCK], or [blocks, elements] (those of low nibbles)."""
    if KIND < 0 or KIND == 3:
        column = start + tl.arange(0, BLOCK)
    else:
        ELEMENTS: tl.constexpr = 32 if KIND == 0 else 16
        column = start + tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, ELEMENTS)[None, :]
    return column


@triton.jit
def _normed(
    x: tl.tensor,
    norm_weight: tl.tensor,
    column: tl.tensor,
    squares: tl.tensor,
    DEPTH: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tl.tensor:
    """(x at these columns times the norm's weights, running sums of squares)."""
    inside = column < DEPTH
    values = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares += values * values
        values = values * tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    return values, squares


@triton.jit
def _add_products(
    sums: tl.tensor,  # f32[rows, block], or [rows, blocks] of quantised weights
    weight: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    row: tl.tensor,  # i64[rows]
    exists: tl.tensor,
    start: tl.tensor,
    first: tl.tensor,  # f32[1 or rows, columns of the step]
    second: tl.tensor,  # the same for high nibbles
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    ROWS: tl.constexpr = sums.shape[0]
    if KIND < 0:
        column = start + tl.arange(0, BLOCK)
        mask = exists[:, None] & (column < DEPTH)[None, :]
        numbers = tl.load(weight + row[:, None] * DEPTH + column[None, :], mask=mask, other=0.0)
        sums += numbers.to(tl.float32) * first
    elif KIND == 3:
        numbers = unpack_words(load_words(weight, row, exists, start, DEPTH, BLOCK)) * (first * LIFT)
        powers = load_powers(scales, row, exists, start, LIFTED, DEPTH, BLOCK)
        sums += tl.sum(tl.reshape(numbers, [ROWS, BLOCK // 32, 32]), axis=2) * powers
    else:
        block = start // 32 + tl.arange(0, BLOCK // 32)
        inside = exists[:, None] & (block < DEPTH // 32)[None, :]
        place = row[:, None] * (DEPTH // 32) + block[None, :]
        codes = load_codes(weight, place, inside, KIND)
        scale, offset = load_factors(scales, minima, place, inside, KIND)
        sums += dot_blocks(codes, scale, offset, first, second, KIND)
    return sums


@triton.jit
def up_kernel(
    x: tl.tensor,  # [tokens, depth]
    weight: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    bias: tl.tensor,  # [experts, outputs (times 2 if GATED)]
    norm_weight: tl.tensor,  # [depth]
    experts: tl.tensor,  # i32[pairs]
    out: tl.tensor,  # [pairs, outputs]
    num_outputs: tl.tensor,
    eps: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    TOP_K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """act(gate x) * (up x) of one pair, or act(up x) without gates: GEMV over rows of its expert."""
    WIDTH: tl.constexpr = BLOCK if KIND < 0 else BLOCK // 32
    pair = tl.program_id(1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = output < num_outputs
    sums = tl.zeros([OUTPUTS, WIDTH], tl.float32)
    up_sums = tl.zeros([OUTPUTS, WIDTH], tl.float32)
    squares = tl.zeros(_columns(0, KIND, BLOCK).shape, tl.float32)
    wait_for_inputs()
    expert = tl.load(experts + pair).to(tl.int64)
    row = expert * num_outputs * (2 if GATED else 1) + output
    source = x + (pair // TOP_K).to(tl.int64) * DEPTH
    for start in tl.range(0, DEPTH, BLOCK, num_stages=STAGES):
        column = _columns(start, KIND, BLOCK)
        first, squares = _normed(source, norm_weight, column, squares, DEPTH, HAS_NORM)
        second = first
        if KIND == 1 or KIND == 2:
            second, squares = _normed(source, norm_weight, column + 16, squares, DEPTH, HAS_NORM)
        first, second = tl.expand_dims(first, 0), tl.expand_dims(second, 0)
        sums = _add_products(sums, weight, scales, minima, row, exists, start, first, second, DEPTH, KIND, BLOCK)
        if GATED:
            up_sums = _add_products(
                up_sums, weight, scales, minima, row + num_outputs, exists, start, first, second, DEPTH, KIND, BLOCK
            )
    gate, up = tl.sum(sums, axis=1), tl.sum(up_sums, axis=1)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(tl.reshape(squares, [squares.numel]), axis=0) / DEPTH + eps)
        gate, up = gate * factor, up * factor
    if HAS_BIAS:
        gate += tl.load(bias + row, mask=exists, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias + row + num_outputs, mask=exists, other=0.0).to(tl.float32)
    result = gated(gate, up, ACTIVATION) if GATED else activate(gate, ACTIVATION)
    tl.store(out + pair.to(tl.int64) * num_outputs + output, result.to(out.dtype.element_ty), mask=exists)


@triton.jit
def down_kernel(
    x: tl.tensor,  # [pairs, depth]
    weight: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    bias: tl.tensor,  # [experts, outputs]
    residual: tl.tensor,  # [tokens, outputs]
    experts: tl.tensor,  # i32[pairs]
    shares: tl.tensor,  # f32[pairs]
    out: tl.tensor,  # [tokens, outputs]
    num_outputs: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # power of 2, at least TOP_K
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """The weighted sum of a token's experts: GEMV over the same rows of all of them at once."""
    WIDTH: tl.constexpr = BLOCK if KIND < 0 else BLOCK // 32
    token = tl.program_id(1).to(tl.int64)
    number = tl.arange(0, CHOICES * OUTPUTS)
    choice, output = number // OUTPUTS, tl.program_id(0) * OUTPUTS + number % OUTPUTS
    pair = token * TOP_K + choice
    exists = (choice < TOP_K) & (output < num_outputs)
    sums = tl.zeros([CHOICES * OUTPUTS, WIDTH], tl.float32)
    wait_for_inputs()
    row = tl.load(experts + pair, mask=exists, other=0).to(tl.int64) * num_outputs + output
    share = tl.load(shares + pair, mask=exists, other=0.0)
    for start in tl.range(0, DEPTH, BLOCK, num_stages=STAGES):
        column = tl.expand_dims(_columns(start, KIND, BLOCK), 0)
        mine = exists[:, None]
        source = x + pair[:, None] * DEPTH
        if KIND >= 0 and KIND != 3:
            mine, source = mine[:, :, None], source[:, :, None]
        first = tl.load(source + column, mask=mine & (column < DEPTH), other=0.0).to(tl.float32)
        second = first
        if KIND == 1 or KIND == 2:
            second = tl.load(source + column + 16, mask=mine & (column < DEPTH), other=0.0).to(tl.float32)
        sums = _add_products(sums, weight, scales, minima, row, exists, start, first, second, DEPTH, KIND, BLOCK)
    result = tl.sum(sums, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + row, mask=exists, other=0.0).to(tl.float32)
    total = tl.sum(tl.reshape(result * share, [CHOICES, OUTPUTS]), axis=0)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    if HAS_RESIDUAL:
        total += tl.load(residual + token * num_outputs + output, mask=output < num_outputs, other=0.0).to(tl.float32)
    tl.store(out + token * num_outputs + output, total.to(out.dtype.element_ty), mask=output < num_outputs)


@triton.jit
def _multiply_step(
    sums: tl.tensor,  # f32[outputs, rows]
    weight: tl.tensor,  # the stack, or its descriptor
    scales: tl.tensor,
    minima: tl.tensor,
    first_row: tl.tensor,  # of the tile, in the stack
    output_exists: tl.tensor,
    start: tl.tensor,
    first: tl.tensor,  # [rows, columns]
    second: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    row = first_row + tl.arange(0, sums.shape[0])
    if KIND < 0:
        source = weight if DESCRIBED else weight + row.to(tl.int64)[:, None] * DEPTH
        numbers = load_tile(source, first_row, output_exists, start, DEPTH, BLOCK, DESCRIBED)
        sums = tl.dot(numbers, tl.trans(first), sums, input_precision=PRECISION)
    elif KIND == 3:
        numbers = dense_tile(weight, scales, row.to(tl.int64), output_exists, start, DEPTH, BLOCK)
        sums = tl.dot(numbers.to(first.dtype), tl.trans(first), sums, input_precision=PRECISION)
    else:
        block = start // 32 + tl.arange(0, BLOCK // 32)
        inside = output_exists[:, None] & (block < DEPTH // 32)[None, :]
        place = row.to(tl.int64)[:, None] * (DEPTH // 32) + block[None, :]
        codes = load_codes(weight, place, inside, KIND)
        scale, offset = load_factors(scales, minima, place, inside, KIND)
        sums = multiply_codes(sums, codes, scale, offset, first, second, KIND, PRECISION)
    return sums


@triton.jit
def grouped_kernel(
    x: tl.tensor,  # [tokens, depth] if FIRST, else [pairs, depth] in the order of experts
    weight: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    bias: tl.tensor,  # [experts, outputs (times 2 if GATED)]
    pairs: tl.tensor,
    shares: tl.tensor,  # f32[pairs]  weight of each pair; unused if FIRST
    tile_expert: tl.tensor,
    tile_begin: tl.tensor,
    tile_end: tl.tensor,
    out: tl.tensor,  # [pairs, outputs], in the order of experts if FIRST, else of tokens
    num_experts: tl.tensor,
    num_outputs: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    TOP_K: tl.constexpr,
    FIRST: tl.constexpr,  # the first product, with its activation
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Up, or gate and up, with their activation, or the second product times the weights of the pairs, of one tile."""
    tile = tl.program_id(1)
    wait_for_inputs()
    expert = tl.load(tile_expert + tile)
    if expert < num_experts:
        place = tl.load(tile_begin + tile) + tl.arange(0, ROWS)
        exists = place < tl.load(tile_end + tile)
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        output_exists = output < num_outputs
        pair = tl.load(pairs + place, mask=exists, other=0)
        row = pair // TOP_K if FIRST else place
        x_source = x + row.to(tl.int64)[:, None] * DEPTH
        first_row = expert * num_outputs * (2 if GATED else 1) + tl.program_id(0) * OUTPUTS
        sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
        up_sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
        if KIND <= 0 or KIND == 3:
            position = tl.arange(0, BLOCK)
        else:
            position = tl.arange(0, BLOCK // 2) // 16 * 32 + tl.arange(0, BLOCK // 2) % 16
        for start in tl.range(0, DEPTH, BLOCK, num_stages=STAGES):
            column = (start + position)[None, :]
            wanted = exists[:, None]
            if DEPTH % BLOCK != 0:
                wanted = wanted & (column < DEPTH)
            first = tl.load(x_source + column, mask=wanted, other=0.0)
            second = first
            if KIND == 1 or KIND == 2:
                second = tl.load(x_source + column + 16, mask=wanted, other=0.0)
            sums = _multiply_step(
                sums, weight, scales, minima, first_row, output_exists, start, first, second, DEPTH,
                KIND, BLOCK, DESCRIBED, PRECISION,
            )  # fmt: skip
            if GATED:
                up_sums = _multiply_step(
                    up_sums, weight, scales, minima, first_row + num_outputs, output_exists, start, first, second,
                    DEPTH, KIND, BLOCK, DESCRIBED, PRECISION,
                )  # fmt: skip
        if HAS_BIAS:
            own = bias + first_row + tl.arange(0, OUTPUTS)
            sums += tl.load(own, mask=output_exists, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up_sums += tl.load(own + num_outputs, mask=output_exists, other=0.0).to(tl.float32)[:, None]
        if FIRST:
            sums = gated(sums, up_sums, ACTIVATION) if GATED else activate(sums, ACTIVATION)
            target = place
        else:
            sums *= tl.load(shares + pair, mask=exists, other=0.0)[None, :]
            target = pair
        tl.store(
            out + target.to(tl.int64)[:, None] * num_outputs + output[None, :],
            tl.trans(sums).to(out.dtype.element_ty),
            mask=exists[:, None] & output_exists[None, :],
        )


@triton.jit
def sum_kernel(
    parts: tl.tensor,  # [tokens, top_k, columns]
    residual: tl.tensor,  # [tokens, columns]
    out: tl.tensor,  # [tokens, columns]
    num_columns: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """The outputs of a token's experts, added in the order of its choice."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    total = tl.zeros([BLOCK], tl.float32)
    wait_for_inputs()
    for choice in tl.static_range(TOP_K):
        total += tl.load(parts + (token * TOP_K + choice) * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + token * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * num_columns + column, total.to(out.dtype.element_ty), mask=inside)
