"""Launches of `rows_product.cu`: a few rows times a matrix in bf16; its weights arrive while earlier kernels run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from bifolio.kernels.cuda import nvrtc
from bifolio.kernels.interface import Norm

SOURCES = "common", "activations", "rows_product"
WARPS = 8  # that multiply
FEW_ROWS = 4  # rows in f32 that take two columns each
MOST_ROWS = 8  # columns of the right factor of the tensor cores
STEP = WARPS * 32  # columns that the warps multiply at a time
MOST_SLICE = 8192  # columns of a thread block: a lane holds its part of x in registers
PLACE_BYTES = 65_536  # of the columns of a unit that arrive together, at most
RING_BYTES = 197_000  # of weights in flight
SHARED_BYTES = 227 * 1024  # that a thread block can have
KNOWN = torch.float32, torch.bfloat16


@dataclass(frozen=True, slots=True)
class RowsPlan:
    """How a product is divided among thread blocks."""

    rows: int  # of x that are compiled for
    cluster: int  # thread blocks that share the columns of a unit
    unit: int  # rows of the weight whose sums a thread block has at a time
    units: int
    grid: int  # thread blocks
    chunk: int  # columns of a unit that arrive together
    stages: int  # of these in flight
    shared_bytes: int


@cache
def plan_of(rows: int, depth: int, num_rows: int, *, num_processors: int) -> RowsPlan | None:
    """The most even division of `rows` rows of the weight; None: this kernel cannot."""
    cluster = 1 if depth <= MOST_SLICE else 2
    if depth % (STEP * cluster) or depth > 2 * MOST_SLICE or not 1 < num_rows <= MOST_ROWS:
        return None
    groups, best, unit = num_processors // cluster, -1.0, 0
    for size in (16, 8):  # whole rows arrive in one copy
        if rows % size or (size > 8 and 2 * size * depth > PLACE_BYTES):
            continue
        busy = rows // size / (-(-(rows // size) // groups) * groups)
        if busy > best + 0.01:
            best, unit = busy, size
    if not unit or not groups:
        return None
    units, slice_size = rows // unit, depth // cluster
    chunk = max(
        size for size in range(STEP, slice_size + 1, STEP)
        if slice_size % size == 0 and (size == STEP or unit * 2 * size <= PLACE_BYTES)
    )  # fmt: skip
    grid = min(units, groups) * cluster
    count, place_bytes = -(-units // (grid // cluster)), unit * 2 * chunk
    most = FEW_ROWS if num_rows <= FEW_ROWS else MOST_ROWS
    sums = unit * most * 4
    fixed_bytes = WARPS * 8 * 4 + 2 * sums * WARPS + (2 * count * sums if cluster > 1 else 0)
    room = min(RING_BYTES, SHARED_BYTES - fixed_bytes)
    stages = min(room // (place_bytes + 16), count * (slice_size // chunk))
    if stages < 1:
        return None
    return RowsPlan(most, cluster, unit, units, grid, chunk, stages, stages * (place_bytes + 16) + fixed_bytes)


def can_multiply(
    x: torch.Tensor,  # [2 to 8, depth]
    weight: torch.Tensor,  # [outputs (times 2 if gated), depth]
    *,
    norm: Norm | None,
    residual: torch.Tensor | None,
    num_processors: int,
) -> bool:
    """Whether this kernel multiplies such operands, on this device."""
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or not x.is_contiguous():
        return False
    if x.dtype != (torch.bfloat16 if norm is None else torch.float32):
        return False
    if norm is not None and (norm.weight.dtype not in KNOWN or weight.shape[1] > MOST_SLICE):
        return False
    if residual is not None and (residual.dtype not in KNOWN or not residual.is_contiguous()):
        return False
    plan = plan_of(*weight.shape, len(x), num_processors=num_processors)
    return plan is not None and nvrtc.works()


def rows_product(
    x: torch.Tensor,  # [2 to 8, depth]
    weight: torch.Tensor,  # bf16[outputs (times 2 if gated), depth]
    *,
    norm: Norm | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: int,  # of a gate; -1: none
    out_dtype: torch.dtype,
    num_processors: int,
    is_first: bool = False,  # of a pass
) -> torch.Tensor:
    """[rows of x, outputs]"""
    rows, depth = weight.shape
    plan = plan_of(rows, depth, len(x), num_processors=num_processors)
    if plan is None:
        raise ValueError(f"no plan for {len(x)} rows and a weight of {rows}x{depth}: ask `can_multiply` first")
    out = torch.empty((len(x), rows // 2 if activation >= 0 else rows), dtype=out_dtype, device=x.device)
    wide = torch.float32
    module = nvrtc.load_source(
        SOURCES, torch.cuda.current_device(), ROWS=plan.rows, DEPTH=depth, SLICE=depth // plan.cluster,
        CHUNK=plan.chunk, UNIT=plan.unit, STAGES=plan.stages, WARPS=WARPS, CLUSTER=plan.cluster,
        IS_NORMED=norm is not None, IS_SCALE_WIDE=norm is not None and norm.weight.dtype == wide, ACTIVATION=activation,
        HAS_BIAS=bias is not None, IS_BIAS_WIDE=bias is not None and bias.dtype == wide,
        HAS_RESIDUAL=residual is not None, IS_RESIDUAL_WIDE=residual is not None and residual.dtype == wide,
        IS_OUT_WIDE=out_dtype == wide, IS_FIRST=is_first,
    )  # fmt: skip
    module.function("rows_product").launch(
        (plan.grid,),
        (WARPS + 1) * 32,
        (
            x, weight, weight if norm is None else norm.weight, weight if bias is None else bias,
            x if residual is None else residual, out, out.shape[1], plan.units, len(x),
            0.0 if norm is None else norm.eps,
        ),
        shared_bytes=plan.shared_bytes,
        pdl=True,
    )  # fmt: skip
    return out
