"""Launches of `row_product.cu`: a row times a matrix in bf16, FP8 or codes (`triton.row_layouts`).

Its weights arrive while earlier kernels run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from bifolio.kernels.cuda import nvrtc
from bifolio.kernels.interface import Norm, Routing

SOURCES = "common", "activations", "row_values", "row_changes", "code_scales", "row_codes", "row_product"
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
MOST_CODES_DEPTH = 32768  # the same for rows of codes
CODED_GAIN = 0.05  # share of busy multiprocessors for which fewer rows of codes arrive together: each unit is added up
CODED = (0, 1, 2, 3)  # SCALES of rows of codes that this kernel multiplies
NO_CODES = {
    "CODE_BYTES": 0, "LOW": 8, "HIGH": 0, "GROUP": 32, "SCALES": 0, "ZERO": 0,
    "HIGH_AT": 0, "SCALES_AT": 0, "TOPS_AT": 0,
}  # fmt: skip
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
    code_bytes: int = 0,
    thin: int = 0,
) -> RowPlan | None:
    """The most even division of `rows` rows among the multiprocessors; None: this kernel cannot.

    Rows that are not whole belong to several matrices. `ring_bytes`: of the units in flight; 0: choose.
    `value_bytes`: of a dense weight. `code_bytes`: of a row of codes; 0: the weight is dense.
    `thin`: values of the change of an adapter.
    """
    row_bytes = code_bytes or depth * value_bytes
    if row_bytes % 16 or depth > (MOST_CODES_DEPTH if code_bytes else MOST_DEPTH) or (code_bytes and depth % 32):
        return None
    by_tensor = (
        is_whole and not code_bytes and value_bytes == 2 and depth % 32 == 0 and depth <= TENSOR_DEPTH and rows % 8 == 0
    )
    padding = 64 if by_tensor and depth % 64 == 0 else 0  # as in the source
    best, unit, limit = -1.0, 0, min(UNIT_BYTES, ring_bytes // 2 - 16) if ring_bytes else UNIT_BYTES
    for size in (16, 8) if by_tensor else (8, 4, 2, 1):
        smallest = 8 if by_tensor else 2 if gated else 1
        if rows % size or size < smallest or (size > smallest and size * (row_bytes + padding) > limit):
            continue
        units = rows // size
        busy = units / (-(-units // num_processors) * num_processors)
        if busy > best + (CODED_GAIN if code_bytes else 0.01):
            best, unit = busy, size
    if not unit:
        return None
    units, unit_bytes = rows // unit, unit * (row_bytes + padding)
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
    weight: torch.Tensor,  # [outputs (times 2 if gated), depth], or rows of codes
    *,
    norm: Norm | None,
    residual: torch.Tensor | None,
    gated: bool,
    num_processors: int,
    codes: Mapping[str, int] | None = None,  # constants of the layout
    change: RowChange | None = None,
) -> bool:
    """Whether this kernel multiplies such operands, on this device."""
    if codes is None and weight.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return False
    if codes is not None and codes["SCALES"] not in CODED:
        return False
    if not weight.is_contiguous() or x.dtype not in KNOWN:
        return False
    if norm is not None and norm.weight.dtype not in KNOWN:
        return False
    if residual is not None and residual.dtype not in KNOWN:
        return False
    if change is not None and (codes is not None or change.base.dtype != torch.bfloat16 or weight.shape[1] % 8):
        return False
    plan = _plan(x, weight, codes, change, gated=gated, num_processors=num_processors)
    if plan is None or (norm is not None and plan.by_tensor and x.dtype != torch.float32):
        return False
    return nvrtc.works()


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    codes: Mapping[str, int] | None,
    change: RowChange | None,
    *,
    gated: bool,
    num_processors: int,
) -> RowPlan | None:
    return plan_of(
        weight.shape[0], x.numel() if codes is not None else weight.shape[1], gated=gated,
        num_processors=num_processors, value_bytes=weight.element_size(),
        code_bytes=0 if codes is None else weight.shape[1], thin=0 if change is None else change.thin,
    )  # fmt: skip


def row_product(
    x: torch.Tensor,  # [1, depth]
    weight: torch.Tensor,  # bf16 or e4m3[outputs (times 2 if gated), depth], or rows of codes
    *,
    row_scales: torch.Tensor | None = None,  # f32[outputs (times 2 if gated)]  of FP8
    codes: Mapping[str, int] | None = None,  # constants of the layout of rows of codes
    norm: Norm | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: int,  # of a gate; -1: none
    out_dtype: torch.dtype,
    num_processors: int,
    is_first: bool = False,  # of a pass
    out: torch.Tensor | None = None,  # [1, outputs]  to write to
    change: RowChange | None = None,
) -> torch.Tensor:
    """[1, outputs]"""
    rows = weight.shape[0]
    plan = _plan(x, weight, codes, change, gated=activation >= 0, num_processors=num_processors)
    if plan is None:
        raise ValueError(f"no plan for {rows} rows of {x.numel()} columns: ask `can_multiply` first")
    if out is None:
        out = torch.empty((1, rows // 2 if activation >= 0 else rows), dtype=out_dtype, device=x.device)
    launch(
        plan, x, weight, out, out.shape[1], norm=norm, bias=bias, residual=residual, activation=activation,
        is_first=is_first, row_scales=row_scales, codes=codes, change=change,
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
    codes: Mapping[str, int] | None = None,
    change: RowChange | None = None,
) -> None:
    depth, wide = x.numel(), torch.float32
    aides = 0 if change is None else AIDES
    layout = dict(NO_CODES)
    if codes is not None:
        layout |= {name: codes[name] for name in NO_CODES if name in codes} | {"CODE_BYTES": codes["ROW_BYTES"]}
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
        **layout,
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
