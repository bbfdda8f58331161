# mypy: disallow-untyped-decorators=False
"""Products of several rows with weights in FP8: rows are rounded to FP8 as well, with a scale for each.

Some rows are multiplied by our kernel with its fused operations, many by cuBLAS.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.fp8 import FP8, SMALLEST, Fp8Weight
from bifolio.kernels.triton.gemm_small_m import few_rows
from bifolio.kernels.triton.gemm_tuning import INTERPRETED, RowTile
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.quant.fp8 import LARGEST

EXACT_ROWS = 4  # up to this number, rows of x are not rounded
SOME_ROWS = 128  # up to this number, our kernel multiplies
ALIGNED = 16  # of the sizes that cuBLAS multiplies in FP8


def rounds(rows: int, dtype: torch.dtype) -> bool:
    """Whether rows of x in this type are rounded, outside deterministic mode."""
    return rows > EXACT_ROWS and dtype == torch.bfloat16


def some_rows(
    x: torch.Tensor,  # [rows, depth]
    weight: Fp8Weight,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    tile: RowTile | None = None,
) -> torch.Tensor:
    """[rows, outputs]"""
    values, scales = round_rows(x)
    outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
    tile = tile or some_rows_tile(x.shape[0], outputs, weight.shape[1], gated=activation is not None)
    return few_rows(
        values, weight, x_scales=scales, bias=bias, residual=residual, activation=activation,
        out_dtype=out_dtype or x.dtype, tile=tile,
    )  # fmt: skip


def some_rows_tile(rows: int, outputs: int, depth: int, *, gated: bool) -> RowTile:
    """Weights are the left factor: tensor cores multiply 64 of their rows at once.

    Measured on an H200 with the products of Llama-3.1-8B at 8, 16, 64 and 128 rows; each is within 4 % of its best.
    """
    if INTERPRETED:
        return RowTile(64, 64, 4)
    most, few, programs = max(16, triton.next_power_of_2(rows)), rows <= 16, triton.cdiv(outputs, 64)
    if gated:
        tile = RowTile(128, 256, 8, 3) if few else RowTile(128, 128, 8, 4)
    elif few:
        tile = RowTile(64, 256, 4, 4, splits=4) if programs <= 64 else RowTile(64, 256, 4, 3, splits=2)
    elif rows <= 64:
        tile = RowTile(64, 128, 4, 6, splits=2 if programs <= 64 else 1)
    elif depth > 8192:
        tile = RowTile(64, 128, 4, 6, splits=2)
    else:
        tile, most = RowTile(64, 128, 4, 6), 64
    splits = max(min(tile.splits, depth // (2 * tile.depth)), 1)
    return replace(tile, swapped=True, described=True, rows=most, splits=splits)


# -- many rows of x ----------------------------------------------------------------------------------------------------
@triton.jit
def _round_rows_kernel(
    x: tl.tensor,  # [rows, depth]
    values: tl.tensor,  # e4m3[rows, depth]
    scales: tl.tensor,  # f32[rows]
    x_stride: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < DEPTH
    wait_for_inputs()
    own = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(own), axis=0) / LARGEST, SMALLEST)
    rounded = tl.minimum(tl.maximum(own / scale, -LARGEST), LARGEST)
    tl.store(values + row * DEPTH + column, rounded.to(values.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale)


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3[rows, depth], f32[rows, 1]): each row divided by its scale."""
    rows, depth = x.shape
    values = torch.empty((rows, depth), dtype=FP8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(depth)
    if rows:
        _round_rows_kernel[(rows,)](
            x, values, scales, x.stride(0), DEPTH=depth, BLOCK=block, LARGEST=LARGEST, SMALLEST=SMALLEST,
            num_warps=min(max(block // 1024, 1), 16), **OVERLAPPED,
        )  # fmt: skip
    return values, scales


def many_rows(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """[rows, outputs] in the type of x."""
    if weight.scales.shape[1] > 1 or x.dtype != torch.bfloat16 or any(size % ALIGNED for size in weight.shape):
        return torch.nn.functional.linear(x, weight.dense(x.dtype), bias)
    values, scales = round_rows(x)
    if not x.is_cuda:  # in Triton's interpreter
        product = (values.float() @ weight.values.float().T) * scales * weight.scales.T
        return (product if bias is None else product + bias.float()).to(x.dtype)
    return torch._scaled_mm(
        values, weight.values.T, scale_a=scales, scale_b=weight.scales.T, bias=bias, out_dtype=x.dtype
    )
