# mypy: disallow-untyped-decorators=False
"""Products of experts: dense weights (KIND -1), quantised rows (KIND 0, `row_layouts`), or MXFP4 in words (KIND 3).

Products of one token and experts in MXFP4 are in `expert_words`.

    one token      a program reads a few rows of one expert (GEMV); the weighted sum over the token's experts is part
                   of the second product
    many tokens    a program multiplies the tile of one expert by tensor cores; another kernel adds the outputs of a
                   token's experts

The weight is a stack [experts * outputs, depth]; gate and up of an expert are [2 * outputs, depth], gate first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bifolio.kernels.triton.mxfp4 import dense_tile
from bifolio.kernels.triton.norm import activate, gated
from bifolio.kernels.triton.pdl import IS_POSSIBLE, wait_for_inputs
from bifolio.kernels.triton.quantised_kernels import dense_tile as quantised_tile
from bifolio.kernels.triton.tma import load_tile

FEWEST_TURNED = tl.constexpr(64)  # rows from which on tensor cores read unpacked MXFP4 from shared memory


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
def _load_weights(
    weight: tl.tensor,  # dense numbers, or words; the second array has halves, or exponents of words
    halves: tl.tensor,
    bytes: tl.tensor,
    row: tl.tensor,  # i64[rows]
    exists: tl.tensor,
    start: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    HIGH_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    TOPS_AT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """f32[rows, BLOCK]"""
    if KIND < 0:
        column = start + tl.arange(0, BLOCK)
        mask = exists[:, None] & (column < DEPTH)[None, :]
        numbers = tl.load(weight + row[:, None] * DEPTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
    else:
        numbers = quantised_tile(
            weight, halves, bytes, row, exists, start // BLOCK, tl.float32, DEPTH, BLOCK, LOW, HIGH, GROUP, SCALES,
            ZERO, HIGH_AT, SCALES_AT, TOPS_AT, ROW_BYTES,
        )  # fmt: skip
    return numbers


@triton.jit
def up_kernel(
    x: tl.tensor,  # [tokens, depth]
    weight: tl.tensor,
    halves: tl.tensor,
    bytes: tl.tensor,
    bias: tl.tensor,  # [experts, outputs (times 2 if GATED)]
    norm_weight: tl.tensor,  # [depth]
    experts: tl.tensor,  # i32[pairs]
    out: tl.tensor,  # [pairs, outputs]
    num_outputs: tl.tensor,
    eps: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    HIGH_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    TOPS_AT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
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
    pair = tl.program_id(1)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = output < num_outputs
    sums = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    up_sums = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    wait_for_inputs()
    expert = tl.load(experts + pair).to(tl.int64)
    row = expert * num_outputs * (2 if GATED else 1) + output
    source = x + (pair // TOP_K).to(tl.int64) * DEPTH
    for start in tl.range(0, DEPTH, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        values, squares = _normed(source, norm_weight, column, squares, DEPTH, HAS_NORM)
        weights = _load_weights(
            weight, halves, bytes, row, exists, start, DEPTH, KIND, LOW, HIGH, GROUP, SCALES, ZERO, HIGH_AT, SCALES_AT,
            TOPS_AT, ROW_BYTES, BLOCK,
        )  # fmt: skip
        sums += weights * values[None, :]
        if GATED:
            weights = _load_weights(
                weight, halves, bytes, row + num_outputs, exists, start, DEPTH, KIND, LOW, HIGH, GROUP, SCALES, ZERO,
                HIGH_AT, SCALES_AT, TOPS_AT, ROW_BYTES, BLOCK,
            )  # fmt: skip
            up_sums += weights * values[None, :]
    gate, up = tl.sum(sums, axis=1), tl.sum(up_sums, axis=1)
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / DEPTH + eps)
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
    halves: tl.tensor,
    bytes: tl.tensor,
    bias: tl.tensor,  # [experts, outputs]
    residual: tl.tensor,  # [tokens, outputs]
    experts: tl.tensor,  # i32[pairs]
    shares: tl.tensor,  # f32[pairs]
    out: tl.tensor,  # [tokens, outputs]
    num_outputs: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    HIGH_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    TOPS_AT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # power of 2, at least TOP_K
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
) -> None:
    """The weighted sum of a token's experts: GEMV over the same rows of all of them at once."""
    token = tl.program_id(1).to(tl.int64)
    number = tl.arange(0, CHOICES * OUTPUTS)
    choice, output = number // OUTPUTS, tl.program_id(0) * OUTPUTS + number % OUTPUTS
    pair = token * TOP_K + choice
    exists = (choice < TOP_K) & (output < num_outputs)
    sums = tl.zeros([CHOICES * OUTPUTS, BLOCK], tl.float32)
    wait_for_inputs()
    row = tl.load(experts + pair, mask=exists, other=0).to(tl.int64) * num_outputs + output
    share = tl.load(shares + pair, mask=exists, other=0.0)
    for start in tl.range(0, DEPTH, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        mask = exists[:, None] & (column < DEPTH)[None, :]
        values = tl.load(x + pair[:, None] * DEPTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
        weights = _load_weights(
            weight, halves, bytes, row, exists, start, DEPTH, KIND, LOW, HIGH, GROUP, SCALES, ZERO, HIGH_AT, SCALES_AT,
            TOPS_AT, ROW_BYTES, BLOCK,
        )  # fmt: skip
        sums += weights * values
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
    sums: tl.tensor,  # f32[outputs, rows], or [rows, outputs] if TURNED
    weight: tl.tensor,  # the stack, or its descriptor
    halves: tl.tensor,
    bytes: tl.tensor,
    first_row: tl.tensor,  # of the tile, in the stack
    output_exists: tl.tensor,
    start: tl.tensor,
    values: tl.tensor,  # [rows, columns]
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    HIGH_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    TOPS_AT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    DESCRIBED: tl.constexpr,
    TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    row = first_row + tl.arange(0, output_exists.shape[0])
    if KIND < 0:
        source = weight if DESCRIBED else weight + row.to(tl.int64)[:, None] * DEPTH
        numbers = load_tile(source, first_row, output_exists, start, DEPTH, BLOCK, DESCRIBED)
    elif KIND == 3:
        IN_PAIRS: tl.constexpr = IS_POSSIBLE and values.dtype == tl.bfloat16
        numbers = dense_tile(weight, halves, row.to(tl.int64), output_exists, start, DEPTH, BLOCK, IN_PAIRS, TURNED)
        numbers = numbers.to(values.dtype)
    else:
        numbers = quantised_tile(
            weight, halves, bytes, row.to(tl.int64), output_exists, start // BLOCK, values.dtype, DEPTH, BLOCK,
            LOW, HIGH, GROUP, SCALES, ZERO, HIGH_AT, SCALES_AT, TOPS_AT, ROW_BYTES,
        )  # fmt: skip
    if TURNED:
        sums = tl.dot(values, numbers, sums, input_precision=PRECISION)
    else:
        sums = tl.dot(numbers, tl.trans(values), sums, input_precision=PRECISION)
    return sums


@triton.jit
def grouped_kernel(
    x: tl.tensor,  # [tokens, depth] if FIRST, else [pairs, depth] in the order of experts
    weight: tl.tensor,
    halves: tl.tensor,
    bytes: tl.tensor,
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
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    HIGH_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    TOPS_AT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
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
        TURNED: tl.constexpr = KIND == 3 and ROWS >= FEWEST_TURNED
        if TURNED:
            sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
            up_sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        else:
            sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
            up_sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for start in tl.range(0, DEPTH, BLOCK, num_stages=STAGES):
            column = (start + tl.arange(0, BLOCK))[None, :]
            wanted = exists[:, None]
            if DEPTH % BLOCK != 0:
                wanted = wanted & (column < DEPTH)
            values = tl.load(x_source + column, mask=wanted, other=0.0)
            sums = _multiply_step(
                sums, weight, halves, bytes, first_row, output_exists, start, values, DEPTH, KIND, LOW, HIGH, GROUP,
                SCALES, ZERO, HIGH_AT, SCALES_AT, TOPS_AT, ROW_BYTES, BLOCK, DESCRIBED, TURNED, PRECISION,
            )  # fmt: skip
            if GATED:
                up_sums = _multiply_step(
                    up_sums, weight, halves, bytes, first_row + num_outputs, output_exists, start, values, DEPTH, KIND,
                    LOW, HIGH, GROUP, SCALES, ZERO, HIGH_AT, SCALES_AT, TOPS_AT, ROW_BYTES, BLOCK, DESCRIBED, TURNED,
                    PRECISION,
                )  # fmt: skip
        if TURNED:
            sums, up_sums = tl.trans(sums), tl.trans(up_sums)
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
