# mypy: disallow-untyped-decorators=False
"""Kernels over weights in blocks of 32 values (see `quantised`): KIND is 0 for Q8_0, 1 Q4_0, 2 Q4_1, 3 MXFP4.

A tile is [outputs, blocks, elements]: 32 elements of Q8_0, or 16 pairs of elements j and j + 16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bifolio.kernels.triton.epilogue import finish, load_residual
from bifolio.kernels.triton.pdl import wait_for_inputs


@triton.jit
def load_codes(values: tl.tensor, place: tl.tensor, inside: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """i8 values or u8 pairs of the blocks numbered `place` i64[outputs, blocks]."""
    if KIND == 0:
        source = values + place[:, :, None] * 32 + tl.arange(0, 32)[None, None, :]
    else:
        source = values + place[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    return tl.load(source, mask=inside[:, :, None], other=0)


@triton.jit
def load_factors(
    scales: tl.tensor, minima: tl.tensor, place: tl.tensor, inside: tl.tensor, KIND: tl.constexpr
) -> tl.tensor:
    """(scale, offset) of each block, such that value = scale * number + offset: f32[outputs, blocks]."""
    if KIND == 3:
        exponent = tl.load(scales + place, mask=inside, other=0).to(tl.int32)
        bits = tl.where(exponent == 0, 1 << 22, exponent << 23)  # 2 ** (exponent - 127)
        scale = bits.to(tl.float32, bitcast=True) * 16384.0  # `numbers` are smaller by this factor
    else:
        scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
    if KIND == 1:
        offset = scale * -8.0
    elif KIND == 2:
        offset = tl.load(minima + place, mask=inside, other=0.0).to(tl.float32)
    else:
        offset = scale * 0.0
    return scale, offset


@triton.jit
def numbers(code: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """f32: the numbers of 4-bit codes before scale and offset.

    A code of MXFP4 has a sign, two bits of exponent and one of mantissa. At the same places of an f16 they are the
    number over 2 ** 14, subnormal ones included.
    """
    if KIND == 3:
        bits = code.to(tl.uint16)
        bits = ((bits & 7) << 9) | ((bits & 8) << 12)
        number = bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        number = code.to(tl.float32)
    return number


@triton.jit
def dot_blocks(
    tile: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    first: tl.tensor,  # f32[1 or outputs, blocks, elements]  x at the elements of a block, or of low nibbles
    second: tl.tensor,  # at those of high nibbles
    KIND: tl.constexpr,
) -> tl.tensor:
    """Products of each block and x: f32[outputs, blocks]. Codes are multiplied first, scales applied once per block."""
    if KIND == 0:
        sums = tl.sum(tile.to(tl.float32) * first, axis=2) * scale
    else:
        low, high = numbers(tile & 15, KIND), numbers(tile >> 4, KIND)
        sums = tl.sum(low * first + high * second, axis=2) * scale
        if KIND != 3:
            sums += tl.sum(first + second, axis=2) * offset
    return sums


@triton.jit
def _load_x(
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
def one_row_kernel(
    x: tl.tensor,  # [depth]
    values: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    norm_weight: tl.tensor,  # [depth]
    bias: tl.tensor,
    residual: tl.tensor,  # [outputs]
    out: tl.tensor,  # [outputs]
    num_outputs: tl.tensor,
    eps: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of a gate, with its up projection `num_outputs` rows further on; -1: none
) -> None:
    ELEMENTS: tl.constexpr = 32 if KIND == 0 else 16
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = row < num_outputs
    start = row.to(tl.int64)[:, None] * (DEPTH // 32)
    partner_start = (row + num_outputs).to(tl.int64)[:, None] * (DEPTH // 32)
    sums = tl.zeros([OUTPUTS, BLOCKS], tl.float32)
    partner_sums = tl.zeros([OUTPUTS, BLOCKS], tl.float32)
    squares = tl.zeros([BLOCKS, ELEMENTS], tl.float32)
    for first_block in tl.range(0, DEPTH // 32, BLOCKS, num_stages=STAGES):
        block = first_block + tl.arange(0, BLOCKS)
        inside = exists[:, None] & (block < DEPTH // 32)[None, :]
        tile = load_codes(values, start + block[None, :], inside, KIND)
        scale, offset = load_factors(scales, minima, start + block[None, :], inside, KIND)
        if first_block == 0:
            wait_for_inputs()  # weights do not depend on earlier kernels
        column = block[:, None] * 32 + tl.arange(0, ELEMENTS)[None, :]
        first, squares = _load_x(x, norm_weight, column, squares, DEPTH, HAS_NORM)
        second = first
        if KIND != 0:
            second, squares = _load_x(x, norm_weight, column + 16, squares, DEPTH, HAS_NORM)
        sums += dot_blocks(tile, scale, offset, first[None, :, :], second[None, :, :], KIND)
        if ACTIVATION >= 0:
            tile = load_codes(values, partner_start + block[None, :], inside, KIND)
            scale, offset = load_factors(scales, minima, partner_start + block[None, :], inside, KIND)
            partner_sums += dot_blocks(tile, scale, offset, first[None, :, :], second[None, :, :], KIND)
    added = load_residual(residual, row, exists, HAS_RESIDUAL)
    result = tl.sum(sums, axis=1)
    factor = 1.0
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / DEPTH + eps)
    result = result * factor
    up = tl.sum(partner_sums, axis=1) * factor
    finish(
        result, up, row, row, exists, bias, added, out, num_outputs,
        HAS_BIAS=HAS_BIAS, HAS_RESIDUAL=HAS_RESIDUAL, ACTIVATION=ACTIVATION,
    )  # fmt: skip


@triton.jit
def multiply_codes(
    sums: tl.tensor,  # f32[outputs, rows]
    tile: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    first: tl.tensor,  # [rows, blocks * elements]
    second: tl.tensor,
    KIND: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    OUTPUTS: tl.constexpr = sums.shape[0]
    WIDTH: tl.constexpr = first.shape[1]
    scale, offset = scale[:, :, None], offset[:, :, None]
    if KIND == 0:
        weight = (tile.to(tl.float32) * scale).to(first.dtype)
        sums = tl.dot(tl.reshape(weight, [OUTPUTS, WIDTH]), tl.trans(first), sums, input_precision=PRECISION)
    else:
        low = (numbers(tile & 15, KIND) * scale + offset).to(first.dtype)
        high = (numbers(tile >> 4, KIND) * scale + offset).to(first.dtype)
        sums = tl.dot(tl.reshape(low, [OUTPUTS, WIDTH]), tl.trans(first), sums, input_precision=PRECISION)
        sums = tl.dot(tl.reshape(high, [OUTPUTS, WIDTH]), tl.trans(second), sums, input_precision=PRECISION)
    return sums


@triton.jit
def dequantise_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    rows: tl.tensor,  # int[n]  source row of each output row; unused when all are taken in order
    out: tl.tensor,  # [n, depth]
    factor: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOOKS_UP: tl.constexpr,
) -> None:
    target = tl.program_id(0).to(tl.int64)
    row = target
    wait_for_inputs()
    if LOOKS_UP:
        row = tl.load(rows + target).to(tl.int64)
    block = (tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS))[None, :]
    inside = block < DEPTH // 32
    place = row * (DEPTH // 32) + block
    tile = load_codes(values, place, inside, KIND)
    scale, offset = load_factors(scales, minima, place, inside, KIND)
    scale, offset = scale[:, :, None], offset[:, :, None]
    destination = out + target * DEPTH + block[:, :, None] * 32
    if KIND == 0:
        result = tile.to(tl.float32) * scale * factor
        tl.store(
            destination + tl.arange(0, 32)[None, None, :], result.to(out.dtype.element_ty), mask=inside[:, :, None]
        )
    else:
        destination += tl.arange(0, 16)[None, None, :]
        low = (numbers(tile & 15, KIND) * scale + offset) * factor
        high = (numbers(tile >> 4, KIND) * scale + offset) * factor
        tl.store(destination, low.to(out.dtype.element_ty), mask=inside[:, :, None])
        tl.store(destination + 16, high.to(out.dtype.element_ty), mask=inside[:, :, None])
