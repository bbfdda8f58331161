# mypy: disallow-untyped-decorators=False
"""Products of few rows with weights in blocks of 32 values (see `quantised`), on tensor cores.

    out = act(x @ dequantised.T + bias) + residual          (each part optional)

A tile of codes is read as rows of bytes, as dense weights are, and dequantised in registers. Low and high nibbles are
two factors, each with its own columns of x. Programs share the depth of a tile (split-K) as in `gemm_small_m`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bifolio.kernels.triton.epilogue import finish, load_residual
from bifolio.kernels.triton.gemm_small_m import add_parts
from bifolio.kernels.triton.pdl import wait_for_inputs
from bifolio.kernels.triton.quantised_kernels import load_factors, numbers


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x: tl.tensor,  # [rows, depth]
    values: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,  # [rows, outputs]
    out: tl.tensor,  # [rows, outputs]
    partial_sums: tl.tensor,  # f32[tiles, splits, rows of a tile * outputs of a tile (times 2 if gated)]
    arrivals: tl.tensor,  # i32[tiles]  0 between two launches
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    x_stride: tl.tensor,
    DEPTH: tl.constexpr,
    KIND: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a tile
    STAGES: tl.constexpr,
    SWAPPED: tl.constexpr,  # the weight is the left factor
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row_exists, output_exists = row < num_rows, output < num_outputs
    inside = row_exists[:, None] & output_exists[None, :]
    place = row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    x_source = x + row.to(tl.int64)[:, None] * x_stride
    share: tl.constexpr = (DEPTH + BLOCK * SPLITS - 1) // (BLOCK * SPLITS) * BLOCK
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, DEPTH)
    if SWAPPED:
        sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
        up_sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        up_sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    if KIND == 0:
        columns = tl.arange(0, BLOCK)
    else:  # of low nibbles; high ones are those of the elements 16 further on
        pair = tl.arange(0, BLOCK // 2)
        columns = pair // 16 * 32 + pair % 16
    wait_for_inputs()
    added = load_residual(residual, place, inside, HAS_RESIDUAL)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        first = _load_x(x_source, row_exists, start + columns, DEPTH, BLOCK)
        second = first
        if KIND != 0:
            second = _load_x(x_source, row_exists, start + columns + 16, DEPTH, BLOCK)
        low, high = _load_weights(values, scales, minima, output, output_exists, start, DEPTH, BLOCK, KIND, first.dtype)
        sums = _multiply(low, high, first, second, sums, KIND, SWAPPED, PRECISION)
        if ACTIVATION >= 0:
            low, high = _load_weights(
                values, scales, minima, output + num_outputs, output_exists, start, DEPTH, BLOCK, KIND, first.dtype
            )
            up_sums = _multiply(low, high, first, second, up_sums, KIND, SWAPPED, PRECISION)
    if SWAPPED:
        sums = tl.trans(sums)
        up_sums = tl.trans(up_sums)
    if SPLITS > 1:
        sums, up_sums, is_last = add_parts(sums, up_sums, partial_sums, arrivals, SPLITS, ACTIVATION >= 0)
        inside = inside & is_last
    finish(
        sums, up_sums, output[None, :], place, inside, bias, added, out, num_outputs,
        HAS_BIAS=HAS_BIAS, HAS_RESIDUAL=HAS_RESIDUAL, ACTIVATION=ACTIVATION,
    )  # fmt: skip


@triton.jit
def _load_x(
    source: tl.tensor, exists: tl.tensor, column: tl.tensor, DEPTH: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    wanted = exists[:, None]
    if DEPTH % BLOCK != 0:
        wanted = wanted & (column < DEPTH)[None, :]
    return tl.load(source + column[None, :], mask=wanted, other=0.0)


@triton.jit
def _load_weights(
    values: tl.tensor,
    scales: tl.tensor,
    minima: tl.tensor,
    output: tl.tensor,  # rows of the weight
    exists: tl.tensor,
    start: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    TYPE: tl.constexpr,
) -> tl.tensor:
    """Dequantised columns from `start` on: those of all elements of Q8_0, twice, or of low and of high nibbles."""
    OUTPUTS: tl.constexpr = output.shape[0]
    PACKED: tl.constexpr = 1 if KIND == 0 else 2  # values of a byte
    row = output.to(tl.int64)[:, None]
    group = start // 32 + tl.arange(0, BLOCK // 32)
    byte = start // PACKED + tl.arange(0, BLOCK // PACKED)
    has_group, has_byte = exists[:, None], exists[:, None]
    if DEPTH % BLOCK != 0:
        has_group = has_group & (group < DEPTH // 32)[None, :]
        has_byte = has_byte & (byte < DEPTH // PACKED)[None, :]
    scale, offset = load_factors(scales, minima, row * (DEPTH // 32) + group[None, :], has_group, KIND)
    tile = tl.load(values + row * (DEPTH // PACKED) + byte[None, :], mask=has_byte, other=0)
    codes = tl.reshape(tile, [OUTPUTS, BLOCK // 32, 32 // PACKED])
    scale, offset = scale[:, :, None], offset[:, :, None]
    if KIND == 0:
        low = codes.to(tl.float32) * scale
        high = low
    else:
        low = numbers(codes & 15, KIND) * scale + offset
        high = numbers(codes >> 4, KIND) * scale + offset
    low = tl.reshape(low.to(TYPE), [OUTPUTS, BLOCK // PACKED])
    return low, tl.reshape(high.to(TYPE), [OUTPUTS, BLOCK // PACKED])


@triton.jit
def _multiply(
    low: tl.tensor,  # [outputs, columns]
    high: tl.tensor,
    first: tl.tensor,  # [rows, columns]
    second: tl.tensor,
    sums: tl.tensor,  # f32[rows, outputs], or the other way round if swapped
    KIND: tl.constexpr,
    SWAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    if SWAPPED:
        sums = tl.dot(low, tl.trans(first), sums, input_precision=PRECISION)
        if KIND != 0:
            sums = tl.dot(high, tl.trans(second), sums, input_precision=PRECISION)
    else:
        sums = tl.dot(first, tl.trans(low), sums, input_precision=PRECISION)
        if KIND != 0:
            sums = tl.dot(second, tl.trans(high), sums, input_precision=PRECISION)
    return sums
