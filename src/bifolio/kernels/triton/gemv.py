# mypy: disallow-untyped-decorators=False
"""Matrix-vector products (GEMV): bound by reading the weights, with adjacent operations fused in.

    out = act(norm(x) @ weight.T + bias) + residual          (each part optional)

A program computes a few rows of the weight over their whole depth, with plain multiply-adds. Before it waits for its
inputs, it can fetch weights of the next product into the L2 cache: the leading columns of all rows, so that every
program of the next product has the same share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Norm
from bifolio.kernels.triton.epilogue import finish, fused, load_residual
from bifolio.kernels.triton.gemm_tuning import INTERPRETED, RowTile, one_row_tile
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs

LINE_BYTES = tl.constexpr(128)  # of a cache line
AHEAD_BYTES = 24 << 20  # fetched ahead: attention of one sequence takes the time of about this many
NOTHING_AHEAD = {"AHEAD_LINES": 1, "AHEAD_SHARE": 0, "AHEAD_TOTAL": 1, "AHEAD_DEPTH": 1}


@triton.jit
def _one_row_kernel(
    x: tl.tensor,  # [depth]
    weight: tl.tensor,  # [outputs (times 2 if gated), depth]
    norm_weight: tl.tensor,  # [depth]
    bias: tl.tensor,
    residual: tl.tensor,  # [outputs]
    out: tl.tensor,  # [outputs]
    ahead: tl.tensor,  # [rows, AHEAD_DEPTH]  weight of the next product
    num_outputs: tl.tensor,
    eps: tl.tensor,
    DEPTH: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of a gate, with its up projection `num_outputs` rows further on; -1: none
    AHEAD_LINES: tl.constexpr,  # cache lines of each row of `ahead` that are fetched
    AHEAD_SHARE: tl.constexpr,  # cache lines for each program, a power of two; 0: none
    AHEAD_TOTAL: tl.constexpr,
    AHEAD_DEPTH: tl.constexpr,
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
    if AHEAD_SHARE > 0:
        _fetch_ahead(ahead, AHEAD_LINES, AHEAD_SHARE, AHEAD_TOTAL, AHEAD_DEPTH)
    wait_for_inputs()
    values, squares = _normed_values(x, norm_weight, column, squares, DEPTH, DEPTH % BLOCK != 0, HAS_NORM)
    sums += first.to(tl.float32) * values[None, :]
    if ACTIVATION >= 0:
        partner_sums += first_partner.to(tl.float32) * values[None, :]
    for start in tl.range(BLOCK, DEPTH, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        inside = exists[:, None] & (column < DEPTH)[None, :]
        weights = tl.load(source + column[None, :], mask=inside, other=0.0)
        values, squares = _normed_values(x, norm_weight, column, squares, DEPTH, DEPTH % BLOCK != 0, HAS_NORM)
        sums += weights.to(tl.float32) * values[None, :]
        if ACTIVATION >= 0:
            weights = tl.load(partner + column[None, :], mask=inside, other=0.0)
            partner_sums += weights.to(tl.float32) * values[None, :]
    added = load_residual(residual, row, exists, HAS_RESIDUAL)
    result = tl.sum(sums, axis=1)
    factor = 1.0
    if HAS_NORM:
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / DEPTH + eps)
    result = result * factor
    up = tl.sum(partner_sums, axis=1) * factor
    finish(
        result, up, row, row, exists, bias, added, out, num_outputs,
        HAS_BIAS=HAS_BIAS, HAS_RESIDUAL=HAS_RESIDUAL, ACTIVATION=ACTIVATION,
    )  # fmt: skip


@triton.jit
def _fetch_ahead(
    ahead: tl.tensor, LINES: tl.constexpr, SHARE: tl.constexpr, TOTAL: tl.constexpr, DEPTH: tl.constexpr
) -> None:
    """Fetch this program's share of the leading cache lines of every row into the L2 cache."""
    line = tl.minimum(tl.program_id(0) * SHARE + tl.arange(0, SHARE), TOTAL - 1)
    per_line: tl.constexpr = LINE_BYTES * 8 // ahead.dtype.element_ty.primitive_bitwidth
    place = ahead + (line // LINES).to(tl.int64) * DEPTH + line % LINES * per_line
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


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
    weight: torch.Tensor,
    *,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    tile: RowTile | None = None,
    ahead: torch.Tensor | None = None,  # [rows, columns]  weight of the next product, to be fetched into the L2 cache
) -> torch.Tensor:
    """[1, outputs]"""
    outputs, depth = weight.shape
    outputs = outputs if activation is None else outputs // 2
    tile = tile or one_row_tile(outputs, depth, activation is not None)
    block = min(tile.depth, triton.next_power_of_2(depth))
    out = torch.empty((1, outputs), dtype=out_dtype or x.dtype, device=x.device)
    programs = triton.cdiv(outputs, tile.outputs)
    _one_row_kernel[(programs,)](
        x,
        weight,
        weight if norm is None else norm.weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        weight if ahead is None else ahead,
        outputs,
        0.0 if norm is None else norm.eps,
        DEPTH=depth,
        OUTPUTS=tile.outputs,
        BLOCK=block,
        STAGES=tile.stages,
        HAS_NORM=norm is not None,
        **fused(bias, residual, activation),
        **_ahead_constants(ahead, programs),
        num_warps=tile.warps,
        **OVERLAPPED,
    )
    return out


def _ahead_constants(ahead: torch.Tensor | None, programs: int) -> dict[str, int]:
    """Of `_fetch_ahead`: about AHEAD_BYTES of the leading columns."""
    if ahead is None or INTERPRETED or not ahead.is_contiguous():
        return NOTHING_AHEAD
    rows, depth = ahead.shape
    lines = max(min(AHEAD_BYTES // (rows * LINE_BYTES.value), depth * ahead.element_size() // LINE_BYTES.value), 1)
    share = triton.next_power_of_2(triton.cdiv(rows * lines, programs))
    return {"AHEAD_LINES": lines, "AHEAD_SHARE": share, "AHEAD_TOTAL": rows * lines, "AHEAD_DEPTH": depth}
