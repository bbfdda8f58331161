# mypy: disallow-untyped-decorators=False
"""Matrix-vector products (GEMV): bound by reading the weights, with adjacent operations fused in.

    out = act(norm(x) @ weight.T + bias) + residual          (each part optional)

A program computes a few rows of the weight over their whole depth, with plain multiply-adds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Norm
from bifolio.kernels.triton.epilogue import finish, fused, load_residual
from bifolio.kernels.triton.fp8 import Fp8Weight, parts_of, row_scale, scaled
from bifolio.kernels.triton.gemm_tuning import RowTile, one_row_tile
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs


@triton.jit
def _one_row_kernel(
    x: tl.tensor,  # [depth]
    weight: tl.tensor,  # [outputs (times 2 if gated), depth]
    scales: tl.tensor,  # f32[outputs (times 2 if gated), groups of columns]  of an FP8 weight
    norm_weight: tl.tensor,  # [depth]
    bias: tl.tensor,
    residual: tl.tensor,  # [outputs]
    out: tl.tensor,  # [outputs]
    num_outputs: tl.tensor,
    eps: tl.tensor,
    DEPTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale; 0: no scales
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of a gate, with its up projection `num_outputs` rows further on; -1: none
) -> None:
    row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = row < num_outputs
    source = weight + row.to(tl.int64)[:, None] * DEPTH
    partner = weight + (row + num_outputs).to(tl.int64)[:, None] * DEPTH
    sums = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    partner_sums = tl.zeros([OUTPUTS, BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    column = tl.arange(0, BLOCK)
    inside = exists[:, None] & (column < DEPTH)[None, :]
    first = tl.load(source + column[None, :], mask=inside, other=0.0)  # weights do not depend on earlier kernels
    if ACTIVATION >= 0:
        first_partner = tl.load(partner + column[None, :], mask=inside, other=0.0)
    wait_for_inputs()
    values, squares = _normed_values(x, norm_weight, column, squares, DEPTH, DEPTH % BLOCK != 0, HAS_NORM)
    sums += scaled(first, scales, row, column, inside, DEPTH, GROUP) * values[None, :]
    if ACTIVATION >= 0:
        partner_sums += scaled(first_partner, scales, row + num_outputs, column, inside, DEPTH, GROUP) * values[None, :]
    for start in tl.range(BLOCK, DEPTH, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        inside = exists[:, None] & (column < DEPTH)[None, :]
        weights = tl.load(source + column[None, :], mask=inside, other=0.0)
        values, squares = _normed_values(x, norm_weight, column, squares, DEPTH, DEPTH % BLOCK != 0, HAS_NORM)
        sums += scaled(weights, scales, row, column, inside, DEPTH, GROUP) * values[None, :]
        if ACTIVATION >= 0:
            weights = tl.load(partner + column[None, :], mask=inside, other=0.0)
            partner_sums += scaled(weights, scales, row + num_outputs, column, inside, DEPTH, GROUP) * values[None, :]
    added = load_residual(residual, row, exists, HAS_RESIDUAL)
    result = tl.sum(sums, axis=1)
    factor = 1.0
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / DEPTH + eps)
    result = result * factor
    up = tl.sum(partner_sums, axis=1) * factor
    if GROUP >= DEPTH:
        result *= row_scale(scales, row, exists)
        if ACTIVATION >= 0:
            up *= row_scale(scales, row + num_outputs, exists)
    finish(
        result, up, row, row, exists, bias, added, out, num_outputs,
        HAS_BIAS=HAS_BIAS, HAS_RESIDUAL=HAS_RESIDUAL, ACTIVATION=ACTIVATION,
    )  # fmt: skip


@triton.jit
def _normed_values(
    x: tl.tensor,
    norm_weight: tl.tensor,
    column: tl.tensor,
    squares: tl.tensor,
    DEPTH: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_NORM: tl.constexpr,
) -> tl.tensor:
    """(values of these columns times the norm's weights, running sums of squares)."""
    if MASKED:
        values = tl.load(x + column, mask=column < DEPTH, other=0.0).to(tl.float32)
    else:
        values = tl.load(x + column).to(tl.float32)
    if HAS_NORM:
        squares += values * values
        if MASKED:
            values = values * tl.load(norm_weight + column, mask=column < DEPTH, other=0.0).to(tl.float32)
        else:
            values = values * tl.load(norm_weight + column).to(tl.float32)
    return values, squares


def one_row(
    x: torch.Tensor,  # [1, depth]
    weight: torch.Tensor | Fp8Weight,
    *,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    tile: RowTile | None = None,
) -> torch.Tensor:
    """[1, outputs]"""
    outputs, depth = weight.shape
    outputs = outputs if activation is None else outputs // 2
    tile = tile or one_row_tile(outputs, depth, activation is not None)
    block = min(tile.depth, triton.next_power_of_2(depth))
    values, scales, group = parts_of(weight)
    out = torch.empty((1, outputs), dtype=out_dtype or x.dtype, device=x.device)
    _one_row_kernel[(triton.cdiv(outputs, tile.outputs),)](
        x,
        values,
        scales,
        values if norm is None else norm.weight,
        values if bias is None else bias,
        x if residual is None else residual,
        out,
        outputs,
        0.0 if norm is None else norm.eps,
        DEPTH=depth,
        OUTPUTS=tile.outputs,
        BLOCK=block,
        STAGES=tile.stages,
        GROUP=group,
        HAS_NORM=norm is not None,
        **fused(bias, residual, activation),
        num_warps=tile.warps,
        **OVERLAPPED,
    )
    return out
