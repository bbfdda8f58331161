# mypy: disallow-untyped-decorators=False
"""Products of few rows with quantised weights (`row_layouts`) on tensor cores.

    out = act(x @ dequantised.T + bias) + residual          (each part optional)

Tiles of codes are dequantised in registers. Programs share the depth of a tile (split-K) as in `gemm_small_m`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bifolio.kernels.triton.epilogue import finish, load_residual
from bifolio.kernels.triton.gemm_small_m import add_parts
from bifolio.kernels.triton.pdl import wait_for_inputs
from bifolio.kernels.triton.quantised_kernels import dense_tile


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x: tl.tensor,  # [rows, depth]
    words: tl.tensor,
    halves: tl.tensor,
    bytes: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,  # [rows, outputs]
    out: tl.tensor,  # [rows, outputs]
    partial_sums: tl.tensor,  # f32[tiles, splits, rows of a tile * outputs of a tile (times 2 if gated)]
    arrivals: tl.tensor,  # i32[tiles]  0 between two launches
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
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
    place = row.to(tl.int64)[:, None] * out_stride + output[None, :]
    x_source = x + row.to(tl.int64)[:, None] * x_stride
    tiles: tl.constexpr = (DEPTH + BLOCK - 1) // BLOCK
    share: tl.constexpr = (tiles + SPLITS - 1) // SPLITS
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, tiles)
    if SWAPPED:
        sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
        up_sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        up_sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    wait_for_inputs()
    added = load_residual(residual, place, inside, HAS_RESIDUAL)
    for tile in tl.range(begin, end, num_stages=STAGES):
        column = tile * BLOCK + tl.arange(0, BLOCK)
        wanted = row_exists[:, None]
        if DEPTH % BLOCK != 0:
            wanted = wanted & (column < DEPTH)[None, :]
        values = tl.load(x_source + column[None, :], mask=wanted, other=0.0)
        weights = dense_tile(
            words, halves, bytes, output.to(tl.int64), output_exists, tile, values.dtype, DEPTH, BLOCK,
            LOW, HIGH, GROUP, SCALES, ZERO, HIGH_AT, SCALES_AT, TOPS_AT, ROW_BYTES,
        )  # fmt: skip
        sums = _multiply(values, weights, sums, SWAPPED, PRECISION)
        if ACTIVATION >= 0:
            weights = dense_tile(
                words, halves, bytes, (output + num_outputs).to(tl.int64), output_exists, tile, values.dtype, DEPTH,
                BLOCK, LOW, HIGH, GROUP, SCALES, ZERO, HIGH_AT, SCALES_AT, TOPS_AT, ROW_BYTES,
            )  # fmt: skip
            up_sums = _multiply(values, weights, up_sums, SWAPPED, PRECISION)
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
def _multiply(
    values: tl.tensor,  # [rows, block]
    weights: tl.tensor,  # [outputs, block]
    sums: tl.tensor,  # f32[rows, outputs], or the other way round if swapped
    SWAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    if SWAPPED:
        sums = tl.dot(weights, tl.trans(values), sums, input_precision=PRECISION)
    else:
        sums = tl.dot(values, tl.trans(weights), sums, input_precision=PRECISION)
    return sums
