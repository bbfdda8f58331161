"""Launches of `row_product.cu`: a row times a matrix in bf16 or FP8; its weights arrive while earlier kernels run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from bifolio.kernels.cuda import nvrtc
from bifolio.kernels.interface import Norm, Routing

SOURCES = "common", "activations", "row_changes", "row_product"
WARPS = 8  # that multiply
AIDES = 4  # further warps, for the changes of an adapter
HELPERS = 56  # thread blocks that compute its thin values, at most
CHUNK = 256  # columns of x that a warp multiplies at once for them
UNIT_BYTES = 50_000  # of a unit, at most: rows that arrive together
SLICE_BYTES = 111_000  # up to this size a thread block has all its weights in flight at once
RING_BYTES, TENSOR_RING_BYTES = 132_000, 197_000  # of the units in flight otherwise: one thread block on a processor
SHARED_BYTES = 227 * 1024  # that a thread block can have
MOST_DEPTH = 16384  # columns: a lane holds its part of x in registers
TENSOR_DEPTH = 2048  # the same for tensor cores
KNOWN = torch.float32, torch.bfloat16


@dataclass(frozen=True, slots=True)
class RowChange:
    """The adapter of the row; the kernel computes its thin values x @ down.T, too."""

    base: torch.Tensor  # bf16, as the next ones those of `kernels.triton.adapters.GroupedRows`
    table: torch.Tensor
    groups: torch.Tensor
    starts: torch.Tensor  # i32  first column of each part
    first_entry: int
    parts: int
    width: int  # largest rank

    @property
    def thin(self) -> int:
        return self.parts * self.width


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
def plan_of(
    rows: int,
    depth: int,
    *,
    gated: bool,
    num_processors: int,
    is_whole: bool = True,
    ring_bytes: int = 0,
    value_bytes: int = 2,
    thin: int = 0,
) -> RowPlan | None:
    """The most even division of `rows` rows among the multiprocessors; None: this kernel cannot.

    Rows that are not whole belong to several matrices. `ring_bytes`: of the units in flight; 0: choose.
    `value_bytes`: of a weight. `thin`: values of the change of an adapter.
    """
    if depth * value_bytes % 16 or depth > MOST_DEPTH:
        return None
    by_tensor = is_whole and value_bytes == 2 and depth % 32 == 0 and depth <= TENSOR_DEPTH and rows % 8 == 0
    padding = 64 if by_tensor and depth % 64 == 0 else 0  # as in the source
    best, unit, limit = -1.0, 0, min(UNIT_BYTES, ring_bytes // 2 - 16) if ring_bytes else UNIT_BYTES
    for size in (16, 8) if by_tensor else (8, 4, 2, 1):
        smallest = 8 if by_tensor else 2 if gated else 1
        if rows % size or size < smallest or (size > smallest and size * (depth * value_bytes + padding) > limit):
            continue
        units = rows // size
        busy = units / (-(-units // num_processors) * num_processors)
        if busy > best + 0.01:
            best, unit = busy, size
    if not unit:
        return None
    units, unit_bytes = rows // unit, unit * (depth * value_bytes + padding)
    grid = min(units, num_processors)
    count = -(-units // grid)
    sum_bytes = (count * unit + 1) * WARPS * 4 + ((2 * count * unit + thin) * 4 if thin else 0)
    if not ring_bytes and count * unit_bytes <= SLICE_BYTES:
        ring_bytes = SLICE_BYTES
    elif not ring_bytes:
        ring_bytes = TENSOR_RING_BYTES if by_tensor else RING_BYTES
    stages = min(min(ring_bytes, SHARED_BYTES - sum_bytes) // (unit_bytes + 16), count)
    if stages < 1:
        return None
    return RowPlan(by_tensor, unit, units, grid, stages, stages * (unit_bytes + 16) + sum_bytes)


def can_multiply(
    x: torch.Tensor,
    weight: torch.Tensor,  # [outputs (times 2 if gated), depth]
    *,
    norm: Norm | None,
    residual: torch.Tensor | None,
    gated: bool,
    num_processors: int,
    change: RowChange | None = None,
) -> bool:
    """Whether this kernel multiplies such operands, on this device."""
    if weight.dtype not in (torch.bfloat16, torch.float8_e4m3fn) or not weight.is_contiguous() or x.dtype not in KNOWN:
        return False
    if norm is not None and norm.weight.dtype not in KNOWN:
        return False
    if residual is not None and residual.dtype not in KNOWN:
        return False
    if change is not None and (change.base.dtype != torch.bfloat16 or weight.shape[1] % 8):
        return False
    plan = plan_of(
        *weight.shape, gated=gated, num_processors=num_processors, value_bytes=weight.element_size(),
        thin=0 if change is None else change.thin,
    )  # fmt: skip
    if plan is None or (norm is not None and plan.by_tensor and x.dtype != torch.float32):
        return False
    return nvrtc.works()


def row_product(
    x: torch.Tensor,  # [1, depth]
    weight: torch.Tensor,  # bf16 or e4m3[outputs (times 2 if gated), depth]
    *,
    row_scales: torch.Tensor | None = None,  # f32[outputs (times 2 if gated)]  of FP8
    norm: Norm | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: int,  # of a gate; -1: none
    out_dtype: torch.dtype,
    num_processors: int,
    is_first: bool = False,  # of a pass
    change: RowChange | None = None,
) -> torch.Tensor:
    """[1, outputs]"""
    rows, depth = weight.shape
    plan = plan_of(
        rows, depth, gated=activation >= 0, num_processors=num_processors, value_bytes=weight.element_size(),
        thin=0 if change is None else change.thin,
    )  # fmt: skip
    if plan is None:
        raise ValueError(f"no plan for {rows} rows of {depth} columns: ask `can_multiply` first")
    out = torch.empty((1, rows // 2 if activation >= 0 else rows), dtype=out_dtype, device=x.device)
    launch(
        plan, x, weight, out, out.shape[1], norm=norm, bias=bias, residual=residual, activation=activation,
        is_first=is_first, row_scales=row_scales, change=change,
    )  # fmt: skip
    return out


def launch(
    plan: RowPlan,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    outputs: int,  # of one matrix
    *,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: int = -1,
    is_first: bool = False,
    row_scales: torch.Tensor | None = None,
    routing: Routing | None = None,  # of experts
    change: RowChange | None = None,
) -> None:
    depth, wide = x.numel(), torch.float32
    aides = 0 if change is None else AIDES
    experts, shares = (weight, weight) if routing is None else (routing.experts, routing.weights)
    module = nvrtc.load_source(
        SOURCES, torch.cuda.current_device(), DEPTH=depth, UNIT=plan.unit, STAGES=plan.stages, WARPS=WARPS,
        BY_TENSOR=plan.by_tensor, IS_NORMED=norm is not None,
        IS_SCALE_WIDE=norm is not None and norm.weight.dtype == wide, ACTIVATION=activation, IS_X_WIDE=x.dtype == wide,
        HAS_BIAS=bias is not None, IS_BIAS_WIDE=bias is not None and bias.dtype == wide,
        HAS_RESIDUAL=residual is not None, IS_RESIDUAL_WIDE=residual is not None and residual.dtype == wide,
        IS_OUT_WIDE=out.dtype == wide, IS_FIRST=is_first,
        IS_FP8=row_scales is not None, CHOICES=0 if routing is None else routing.experts.shape[1],
        THIN_WIDTH=0 if change is None else change.width, THIN_PARTS=0 if change is None else change.parts, AIDES=AIDES,
    )  # fmt: skip
    module.function("row_product").launch(
        (plan.grid,),
        (WARPS + 1 + aides) * 32,
        (
            x, weight, weight if norm is None else norm.weight, weight if bias is None else bias,
            x if residual is None else residual, experts, shares, out, outputs, plan.units,
            0.0 if norm is None else norm.eps, shares if row_scales is None else row_scales,
            *_arguments(change, plan, depth, weight),
        ),
        shared_bytes=plan.shared_bytes,
        pdl=True,
    )  # fmt: skip


def _arguments(
    change: RowChange | None, plan: RowPlan, depth: int, unused: torch.Tensor
) -> tuple[torch.Tensor | int, ...]:
    if change is None:
        return (*[unused] * 6, 0, 0, 0)
    sums = torch.empty(change.thin * -(-depth // CHUNK), dtype=torch.float32, device=unused.device)
    if unused.device not in _arrivals:
        _arrivals[unused.device] = torch.zeros(1, dtype=torch.int32, device=unused.device)
    return (
        change.base, change.table, change.groups, change.starts, sums, _arrivals[unused.device], change.first_entry,
        change.table.shape[1], max(min(plan.grid // 2, HELPERS), 1),
    )  # fmt: skip


_arrivals: dict[torch.device, torch.Tensor] = {}  # 0 between two launches, which count one after the other
