"""Launches of `row_product.cu`: one row times a bf16 matrix, whose weights arrive while earlier kernels run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from bifolio.kernels.cuda import nvrtc
from bifolio.kernels.interface import Norm

WARPS = 8  # that multiply
UNIT_BYTES = 49152  # of a unit, at most: rows that arrive together
SLICE_BYTES = 111_000  # up to this size a thread block has all its weights in flight at once
RING_BYTES, TENSOR_RING_BYTES = 132_000, 197_000  # of the units in flight otherwise: one thread block on a processor
SHARED_BYTES = 227 * 1024  # that a thread block can have
MOST_DEPTH = 16384  # columns: a lane holds its part of x in registers
TENSOR_DEPTH = 2048  # the same for tensor cores
KNOWN = torch.float32, torch.bfloat16


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How a product is divided among thread blocks."""

    by_tensor: bool  # by tensor cores
    unit: int  # rows of the weight that arrive together
    units: int
    grid: int  # thread blocks
    stages: int  # units in flight
    shared_bytes: int


@cache
def plan_of(rows: int, depth: int, *, gated: bool, num_processors: int) -> RowPlan | None:
    """The most even division of `rows` rows among the multiprocessors; None: this kernel cannot."""
    if depth % 8 or depth > MOST_DEPTH:
        return None
    by_tensor = depth % 32 == 0 and depth <= TENSOR_DEPTH and rows % 8 == 0
    padding = 64 if by_tensor and depth % 64 == 0 else 0  # as in the source
    best, unit = -1.0, 0
    for size in (16, 8) if by_tensor else (8, 4, 2, 1):
        smallest = 8 if by_tensor else 2 if gated else 1
        if rows % size or size < smallest or (size > smallest and size * depth * 2 > UNIT_BYTES):
            continue
        units = rows // size
        busy = units / (-(-units // num_processors) * num_processors)
        if busy > best + 0.01:
            best, unit = busy, size
    if not unit:
        return None
    units, unit_bytes = rows // unit, unit * (depth * 2 + padding)
    grid = min(units, num_processors)
    count = -(-units // grid)
    sum_bytes = (count * unit + 1) * WARPS * 4
    ring_bytes = TENSOR_RING_BYTES if by_tensor else RING_BYTES
    if count * unit_bytes <= SLICE_BYTES:
        ring_bytes = SLICE_BYTES
    stages = min(min(ring_bytes, SHARED_BYTES - sum_bytes) // (unit_bytes + 16), count)
    if stages < 1:
        return None
    return RowPlan(by_tensor, unit, units, grid, stages, stages * (unit_bytes + 16) + sum_bytes)


def can_multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    norm: Norm | None,
    residual: torch.Tensor | None,
    gated: bool,
    num_processors: int,
) -> bool:
    """Whether this kernel multiplies such operands, on this device."""
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or x.dtype not in KNOWN:
        return False
    if norm is not None and (x.dtype != torch.float32 or norm.weight.dtype not in KNOWN):
        return False
    if residual is not None and residual.dtype != torch.float32:
        return False
    return plan_of(*weight.shape, gated=gated, num_processors=num_processors) is not None and nvrtc.works()


def row_product(
    x: torch.Tensor,  # [1, depth]
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
    """[1, outputs]"""
    (rows, depth), gated, wide = weight.shape, activation >= 0, torch.float32
    plan = plan_of(rows, depth, gated=gated, num_processors=num_processors)
    if plan is None:
        raise ValueError(f"no plan for {rows} rows of {depth} columns: ask `can_multiply` first")
    out = torch.empty((1, rows // 2 if gated else rows), dtype=out_dtype, device=x.device)
    module = nvrtc.load_source(
        ("common", "row_product"), torch.cuda.current_device(), DEPTH=depth, UNIT=plan.unit, STAGES=plan.stages,
        WARPS=WARPS, BY_TENSOR=plan.by_tensor, IS_NORMED=norm is not None,
        IS_SCALE_WIDE=norm is not None and norm.weight.dtype == wide, ACTIVATION=activation, IS_X_WIDE=x.dtype == wide,
        HAS_BIAS=bias is not None, IS_BIAS_WIDE=bias is not None and bias.dtype == wide,
        HAS_RESIDUAL=residual is not None, IS_OUT_WIDE=out_dtype == wide, IS_FIRST=is_first,
    )  # fmt: skip
    module.function("row_product").launch(
        (plan.grid,),
        (WARPS + 1) * 32,
        (
            x, weight, weight if norm is None else norm.weight, weight if bias is None else bias,
            x if residual is None else residual, out, out.shape[1], plan.units, 0.0 if norm is None else norm.eps,
        ),
        shared_bytes=plan.shared_bytes,
        pdl=True,
    )  # fmt: skip
    return out
