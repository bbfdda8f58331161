# mypy: disallow-untyped-decorators=False
"""Kernels over quantised rows (`row_layouts`): tiles of codes become numbers in registers.

Codes of BITS bits are placed at the top of the mantissa of an f32 between 1 and 2, without a conversion:

    1 + code / 2 ** BITS        value = that * (scale * 2 ** BITS) + (offset - scale * 2 ** BITS)
"""

from __future__ import annotations

import triton
import triton.language as tl

from bifolio.kernels.triton.epilogue import finish, load_residual
from bifolio.kernels.triton.pdl import wait_for_inputs


@triton.jit
def _half(bits: tl.tensor) -> tl.tensor:
    """f32: the f16 in the low half of each word."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _inside(exists: tl.tensor, place: tl.tensor, END: tl.constexpr, STEP: tl.constexpr) -> tl.tensor:
    """bool[outputs, places]: the rows that exist, up to the end of a row, which whole tiles do not cross."""
    mask = exists[:, None]
    if END % STEP != 0:
        mask = mask & (place < END)[None, :]
    return mask


@triton.jit
def _repeat(values: tl.tensor, TIMES: tl.constexpr) -> tl.tensor:
    """[outputs, n * TIMES]: each value several times."""
    if TIMES > 1:
        OUTPUTS: tl.constexpr = values.shape[0]
        WIDTH: tl.constexpr = values.shape[1]
        spread = tl.broadcast_to(values[:, :, None], [OUTPUTS, WIDTH, TIMES])
        values = tl.reshape(spread, [OUTPUTS, WIDTH * TIMES])
    return values


@triton.jit
def _load_plane(
    words: tl.tensor,
    start: tl.tensor,  # i64[outputs]  first word of each row
    exists: tl.tensor,
    tile: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
    AT: tl.constexpr,
) -> tl.tensor:
    """i32[outputs, BLOCK / 8], or BLOCK / 4 of 8 bits: words with the lowest bits of 8 or 4 columns."""
    COUNT: tl.constexpr = BLOCK * BITS // 32
    word = tile * COUNT + tl.arange(0, COUNT)
    mask = _inside(exists, word, DEPTH * BITS // 32, COUNT)
    found = tl.load(words + start[:, None] + (AT // 4 + word)[None, :], mask=mask, other=0)
    if BITS < 4:
        TIMES: tl.constexpr = 4 // BITS
        shift = tl.arange(0, BLOCK // 8) % TIMES * (2 * BITS)
        found = _repeat(found, TIMES) >> shift[None, :]
    return found


@triton.jit
def _load_factors(
    words: tl.tensor,
    halves: tl.tensor,
    bytes: tl.tensor,
    row: tl.tensor,  # i64[outputs]
    exists: tl.tensor,
    tile: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES_AT: tl.constexpr,
    TOPS_AT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
) -> tl.tensor:
    """(scale, offset), f32[outputs, BLOCK / GROUP]"""
    COUNT: tl.constexpr = BLOCK // GROUP
    group = tile * COUNT + tl.arange(0, COUNT)
    mask = _inside(exists, group, DEPTH // GROUP, COUNT)
    if SCALES == 2 or SCALES == 3:
        TOPS: tl.constexpr = (BLOCK + 255) // 256
        top = tile * BLOCK // 256 + tl.arange(0, TOPS)
        top_mask = _inside(exists, top, DEPTH, BLOCK) if TOPS == 1 else _inside(exists, top, DEPTH // 256, TOPS)
        source = words + (row * (ROW_BYTES // 4))[:, None] + (TOPS_AT // 4 + top)[None, :]
        tops = tl.load(source, mask=top_mask, other=0)
    if SCALES == 0:
        scale = tl.load(
            halves + (row * (ROW_BYTES // 2))[:, None] + (SCALES_AT // 2 + group)[None, :], mask=mask, other=0.0
        ).to(tl.float32)
        offset = scale * -ZERO
    elif SCALES == 1:
        pair = tl.load(
            words + (row * (ROW_BYTES // 4))[:, None] + (SCALES_AT // 4 + group)[None, :], mask=mask, other=0
        )
        scale, offset = _half(pair), _half(pair >> 16)
    elif SCALES == 2:
        found = tl.load(
            halves + (row * (ROW_BYTES // 2))[:, None] + (SCALES_AT // 2 + group)[None, :], mask=mask, other=0.0
        )
        pair = found.to(tl.int16, bitcast=True).to(tl.int32)
        scale = (pair & 255).to(tl.float32) * _repeat(_half(tops), COUNT // TOPS)
        offset = ((pair >> 8) & 255).to(tl.float32) * -_repeat(_half(tops >> 16), COUNT // TOPS)
    else:
        found = tl.load(bytes + (row * ROW_BYTES)[:, None] + (SCALES_AT + group)[None, :], mask=mask, other=0)
        if SCALES == 3:
            scale = found.to(tl.int8, bitcast=True).to(tl.float32) * _repeat(_half(tops), COUNT // TOPS)
        else:  # 2 ** (exponent - 101): numbers of MXFP4 are smaller by 2 ** 26
            power = tl.minimum(found.to(tl.int32) + 26, 254) << 23
            scale = power.to(tl.float32, bitcast=True)
        offset = scale * -ZERO
    return scale, offset


@triton.jit
def _moved(words: tl.tensor, SHIFT: tl.constexpr, BITS: tl.constexpr, PLACE: tl.constexpr) -> tl.tensor:
    """The BITS bits from SHIFT on, at PLACE; zeros elsewhere."""
    moved = words
    if PLACE > SHIFT:
        moved = words << (PLACE - SHIFT)
    elif PLACE < SHIFT:
        moved = words >> (SHIFT - PLACE)
    return moved & (((1 << BITS) - 1) << PLACE)


@triton.jit
def _number(
    low: tl.tensor,
    high: tl.tensor,
    scale: tl.tensor,
    offset: tl.tensor,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SCALES: tl.constexpr,
    COLUMN: tl.constexpr,  # of the columns of a word: 8, or 4 of 8 bits
) -> tl.tensor:
    """f32: the values of one column of each word."""
    SHIFT: tl.constexpr = COLUMN % 4 * 8 + COLUMN // 4 * LOW
    if SCALES == 4:  # sign, exponent and mantissa at their places in an f32: the number over 2 ** 126
        bits = (((low << (28 - SHIFT)) >> 6) & -2118123520).to(tl.float32, bitcast=True)  # 0x81C00000
        value = bits * 1.2676506002282294e30 * scale  # 2 ** 100
    else:
        PLACE: tl.constexpr = 23 - LOW - HIGH
        bits = _moved(low, SHIFT, LOW, PLACE) | 0x3F800000
        if HIGH > 0:
            bits = bits | _moved(high, COLUMN % 4 * 8 + COLUMN // 4 * HIGH, HIGH, PLACE + LOW)
        value = bits.to(tl.float32, bitcast=True) * scale + offset
    return value


@triton.jit
def dense_tile(
    words: tl.tensor,  # the rows of a matrix, three times
    halves: tl.tensor,
    bytes: tl.tensor,
    row: tl.tensor,  # i64[outputs]
    exists: tl.tensor,  # bool[outputs]
    tile: tl.tensor,  # number of the tile in its row
    TYPE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a tile
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    HIGH_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    TOPS_AT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
) -> tl.tensor:
    """TYPE[outputs, BLOCK]: dequantised columns; 0 where rows or columns do not exist."""
    OUTPUTS: tl.constexpr = row.shape[0]
    BIAS: tl.constexpr = 128 if LOW == 8 else 0  # codes of 8 bits have a sign
    start = row * (ROW_BYTES // 4)
    low = _load_plane(words, start, exists, tile, DEPTH, BLOCK, LOW, 0)
    high = low
    if LOW == 8:
        low = low ^ -2139062144  # 0x80808080
    if HIGH > 0:
        high = _load_plane(words, start, exists, tile, DEPTH, BLOCK, HIGH, HIGH_AT)
    scale, offset = _load_factors(
        words, halves, bytes, row, exists, tile, DEPTH, BLOCK, GROUP, SCALES, ZERO + BIAS, SCALES_AT, TOPS_AT, ROW_BYTES
    )
    if SCALES != 4:
        scale = scale * (1 << (LOW + HIGH))
        offset = offset - scale
    COLUMNS: tl.constexpr = 4 if LOW == 8 else 8  # of a word
    scale, offset = _repeat(scale, GROUP // COLUMNS), _repeat(offset, GROUP // COLUMNS)
    n0 = _number(low, high, scale, offset, LOW, HIGH, SCALES, 0).to(TYPE)
    n1 = _number(low, high, scale, offset, LOW, HIGH, SCALES, 1).to(TYPE)
    n2 = _number(low, high, scale, offset, LOW, HIGH, SCALES, 2).to(TYPE)
    n3 = _number(low, high, scale, offset, LOW, HIGH, SCALES, 3).to(TYPE)
    if LOW == 8:
        numbers = tl.join(tl.join(n0, n2), tl.join(n1, n3))
    else:
        n4 = _number(low, high, scale, offset, LOW, HIGH, SCALES, 4).to(TYPE)
        n5 = _number(low, high, scale, offset, LOW, HIGH, SCALES, 5).to(TYPE)
        n6 = _number(low, high, scale, offset, LOW, HIGH, SCALES, 6).to(TYPE)
        n7 = _number(low, high, scale, offset, LOW, HIGH, SCALES, 7).to(TYPE)
        even = tl.join(tl.join(n0, n4), tl.join(n2, n6))
        numbers = tl.join(even, tl.join(tl.join(n1, n5), tl.join(n3, n7)))
    return tl.reshape(numbers, [OUTPUTS, BLOCK])


@triton.jit
def one_row_kernel(
    x: tl.tensor,  # [depth]
    words: tl.tensor,
    halves: tl.tensor,
    bytes: tl.tensor,
    norm_weight: tl.tensor,  # [depth]
    bias: tl.tensor,
    residual: tl.tensor,  # [outputs]
    out: tl.tensor,  # [outputs]
    num_outputs: tl.tensor,
    eps: tl.tensor,
    DEPTH: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    HIGH_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    TOPS_AT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of a gate, with its up projection `num_outputs` rows further on; -1: none
) -> None:
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = row < num_outputs
    sums = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    partner_sums = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for tile in range((DEPTH + BLOCK - 1) // BLOCK):
        weights = dense_tile(
            words, halves, bytes, row.to(tl.int64), exists, tile, tl.float32, DEPTH, BLOCK,
            LOW, HIGH, GROUP, SCALES, ZERO, HIGH_AT, SCALES_AT, TOPS_AT, ROW_BYTES,
        )  # fmt: skip
        if tile == 0:
            wait_for_inputs()  # weights do not depend on earlier kernels
        column = tile * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(x + column, mask=column < DEPTH, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += values * values
            values = values * tl.load(norm_weight + column, mask=column < DEPTH, other=0.0).to(tl.float32)
        sums += weights * values[None, :]
        if ACTIVATION >= 0:
            weights = dense_tile(
                words, halves, bytes, (row + num_outputs).to(tl.int64), exists, tile, tl.float32, DEPTH, BLOCK,
                LOW, HIGH, GROUP, SCALES, ZERO, HIGH_AT, SCALES_AT, TOPS_AT, ROW_BYTES,
            )  # fmt: skip
            partner_sums += weights * values[None, :]
    added = load_residual(residual, row, exists, HAS_RESIDUAL)
    factor = 1.0
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / DEPTH + eps)
    finish(
        tl.sum(sums, axis=1) * factor, tl.sum(partner_sums, axis=1) * factor, row, row, exists, bias, added, out,
        num_outputs, HAS_BIAS=HAS_BIAS, HAS_RESIDUAL=HAS_RESIDUAL, ACTIVATION=ACTIVATION,
    )  # fmt: skip


@triton.jit
def dequantise_kernel(
    words: tl.tensor,
    halves: tl.tensor,
    bytes: tl.tensor,
    rows: tl.tensor,  # int[n]  source row of each output row; unused when all are taken in order
    out: tl.tensor,  # [n, depth]
    num_rows: tl.tensor,
    factor: tl.tensor,
    DEPTH: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO: tl.constexpr,
    HIGH_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    TOPS_AT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOKS_UP: tl.constexpr,
) -> None:
    target = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = target < num_rows
    row = target.to(tl.int64)
    wait_for_inputs()
    if LOOKS_UP:
        row = tl.load(rows + target, mask=exists, other=0).to(tl.int64)
    numbers = dense_tile(
        words, halves, bytes, row, exists, tl.program_id(1), tl.float32, DEPTH, BLOCK,
        LOW, HIGH, GROUP, SCALES, ZERO, HIGH_AT, SCALES_AT, TOPS_AT, ROW_BYTES,
    )  # fmt: skip
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = out + target.to(tl.int64)[:, None] * DEPTH + column[None, :]
    mask = exists[:, None] & (column < DEPTH)[None, :]
    tl.store(place, (numbers * factor).to(out.dtype.element_ty), mask=mask)
