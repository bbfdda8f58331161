# mypy: disallow-untyped-decorators=False
"""Matrix products with few rows (small-M GEMM): bound by reading the weights, with adjacent operations fused in.

    out = act(x @ weight.T + bias + changes of adapters) + residual          (each part optional)

Tensor cores multiply; the weight is streamed through shared memory, by TMA where that is faster (`tma`; tile sizes:
`gemm_tuning`). Where there are too few outputs to fill the GPU, several programs share the depth of one tile (split-K);
the last one to finish adds their sums, always in the same order. More rows go to cuBLAS, one row to `gemv`; in
deterministic mode all rows come here (`gemm_tuning.fixed_tile`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton import adapter_changes
from bifolio.kernels.triton.adapter_changes import Change, adapters_at, added_changes, part_at, places, up_tile
from bifolio.kernels.triton.epilogue import finish, fused, load_residual
from bifolio.kernels.triton.fp8 import Fp8Weight, group_scale, parts_of, row_scale
from bifolio.kernels.triton.gemm_tuning import RowTile, few_rows_tile, fixed_tile
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.tma import can_be_described, describe, load_tile


@triton.jit(do_not_specialize=["num_rows", "first_entry", "num_entries"])
def _few_rows_kernel(
    x: tl.tensor,  # [rows, depth], or its tensor descriptor
    weight: tl.tensor,  # [outputs (times 2 if gated), depth], or its tensor descriptor
    scales: tl.tensor,  # f32[outputs (times 2 if gated), groups of columns]  of an FP8 weight
    x_scales: tl.tensor,  # f32[rows]  of x in FP8
    bias: tl.tensor,
    residual: tl.tensor,  # [rows, outputs]
    out: tl.tensor,  # [rows, outputs]
    partial_sums: tl.tensor,  # f32[tiles, splits, rows of a tile * outputs of a tile (times 2 if gated)]
    arrivals: tl.tensor,  # i32[tiles]  0 between two launches
    thin: tl.tensor,  # as the others of `added_changes`
    base: tl.tensor,
    table: tl.tensor,
    groups: tl.tensor,
    members: tl.tensor,
    starts: tl.tensor,
    first_entry: tl.tensor,
    num_entries: tl.tensor,
    num_rows: tl.tensor,
    num_outputs: tl.tensor,
    x_stride: tl.tensor,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SWAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale, `BLOCK` or all; 0: no scales
    X_SCALED: tl.constexpr,
    DESCRIBED: tl.constexpr,
    X_DESCRIBED: tl.constexpr,
    WIDTH: tl.constexpr,  # of the changes of adapters; 0: none
    PIECES: tl.constexpr,
) -> None:
    first_row, first_output = tl.program_id(1) * ROWS, tl.program_id(0) * OUTPUTS
    first_row = tl.minimum(first_row, tl.maximum(num_rows - ROWS, 0))  # the last tile is whole: it overlaps another
    row, output = first_row + tl.arange(0, ROWS), first_output + tl.arange(0, OUTPUTS)
    row_exists, output_exists = row < num_rows, output < num_outputs
    x_source = x
    if not X_DESCRIBED:
        x_source = x + row[:, None] * x_stride
    source, partner = weight, weight
    if not DESCRIBED:
        source = weight + output.to(tl.int64)[:, None] * DEPTH
        partner = weight + (output + num_outputs).to(tl.int64)[:, None] * DEPTH
    inside = row_exists[:, None] & output_exists[None, :]
    place = row.to(tl.int64)[:, None] * num_outputs + output[None, :]
    share: tl.constexpr = (DEPTH + BLOCK * SPLITS - 1) // (BLOCK * SPLITS) * BLOCK
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, DEPTH)
    if SWAPPED:
        sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
        up_sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
        up_sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    if WIDTH == 0:
        wait_for_inputs()
        added = load_residual(residual, place, inside, HAS_RESIDUAL)
    else:  # x is complete: the kernel before this one, which makes the thin values, has waited for it
        part, column = part_at(starts, first_output)
        entry, own_output = first_entry + part, output - column
        member = tl.load(members + row, mask=row_exists, other=-1)
        num_groups = tl.load(groups + num_rows)
        adapter = adapters_at(groups, 0, num_rows, WIDTH, PIECES)
        change_place, change_bias, own_rank = places(table, adapter, entry, num_entries)
        if ACTIVATION >= 0:
            partner_place, partner_bias, partner_rank = places(table, adapter, entry + 1, num_entries)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        values = load_tile(x_source, first_row, row_exists, start, DEPTH, BLOCK, X_DESCRIBED)
        weights = load_tile(source, first_output, output_exists, start, DEPTH, BLOCK, DESCRIBED)
        scale = group_scale(scales, output, output_exists, start, DEPTH, GROUP)
        sums = _multiply(values, weights, scale, sums, SWAPPED, PRECISION, GROUP > 0 and GROUP < DEPTH)
        if ACTIVATION >= 0:
            weights = load_tile(partner, num_outputs + first_output, output_exists, start, DEPTH, BLOCK, DESCRIBED)
            scale = group_scale(scales, output + num_outputs, output_exists, start, DEPTH, GROUP)
            up_sums = _multiply(values, weights, scale, up_sums, SWAPPED, PRECISION, GROUP > 0 and GROUP < DEPTH)
    if SWAPPED:
        sums = tl.trans(sums)
        up_sums = tl.trans(up_sums)
    if WIDTH > 0:
        first_weights = up_tile(base, change_place, own_rank, 0, own_output, output_exists, WIDTH, PIECES)
        if ACTIVATION >= 0:
            first_partner = up_tile(base, partner_place, partner_rank, 0, own_output, output_exists, WIDTH, PIECES)
        wait_for_inputs()
        added = load_residual(residual, place, inside, HAS_RESIDUAL)
    if SPLITS > 1:
        sums, up_sums, is_last = add_parts(sums, up_sums, partial_sums, arrivals, SPLITS, ACTIVATION >= 0)
        inside = inside & is_last
    if GROUP >= DEPTH:
        sums *= row_scale(scales, output, output_exists)[None, :]
        if ACTIVATION >= 0:
            up_sums *= row_scale(scales, output + num_outputs, output_exists)[None, :]
    if X_SCALED:
        x_scale = row_scale(x_scales, row, row_exists)[:, None]
        sums *= x_scale
        up_sums *= x_scale
    if WIDTH > 0:
        sums += added_changes(
            thin, base, table, groups, entry, num_entries, part, first_weights, own_rank, change_bias, num_groups, row,
            member, own_output, output_exists, num_rows, WIDTH, PIECES, PRECISION,
        )  # fmt: skip
        if ACTIVATION >= 0:
            up_sums += added_changes(
                thin, base, table, groups, entry + 1, num_entries, part + 1, first_partner, partner_rank, partner_bias,
                num_groups, row, member, own_output, output_exists, num_rows, WIDTH, PIECES, PRECISION,
            )  # fmt: skip
    finish(
        sums, up_sums, output[None, :], place, inside, bias, added, out, num_outputs,
        HAS_BIAS=HAS_BIAS, HAS_RESIDUAL=HAS_RESIDUAL, ACTIVATION=ACTIVATION,
    )  # fmt: skip


@triton.jit
def _multiply(
    values: tl.tensor,  # [rows, block]
    weights: tl.tensor,  # [outputs, block]
    scale: tl.tensor,  # f32[outputs]
    sums: tl.tensor,  # f32[rows, outputs], or the other way round if swapped
    SWAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUPED: tl.constexpr,
) -> tl.tensor:
    weights = weights.to(values.dtype)
    if GROUPED and SWAPPED:
        sums += tl.dot(weights, tl.trans(values), input_precision=PRECISION) * scale[:, None]
    elif GROUPED:
        sums += tl.dot(values, tl.trans(weights), input_precision=PRECISION) * scale[None, :]
    elif values.dtype == tl.float8e4nv:  # tensor cores keep few bits of sums of FP8: they are moved to f32 soon
        IMPRECISE: tl.constexpr = 128 if weights.shape[1] > 128 else weights.shape[1]
        if SWAPPED:
            sums = tl.dot(weights, tl.trans(values), sums, max_num_imprecise_acc=IMPRECISE)
        else:
            sums = tl.dot(values, tl.trans(weights), sums, max_num_imprecise_acc=IMPRECISE)
    elif SWAPPED:
        sums = tl.dot(weights, tl.trans(values), sums, input_precision=PRECISION)
    else:
        sums = tl.dot(values, tl.trans(weights), sums, input_precision=PRECISION)
    return sums


@triton.jit
def add_parts(
    sums: tl.tensor,  # f32[rows, outputs]  of this program
    up_sums: tl.tensor,
    partial_sums: tl.tensor,
    arrivals: tl.tensor,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
) -> tl.tensor:
    """(sums, up projection's sums) of all programs of the tile, bool[rows, outputs]: whether this one is last."""
    ROWS: tl.constexpr = sums.shape[0]
    OUTPUTS: tl.constexpr = sums.shape[1]
    part = tl.program_id(2)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    width: tl.constexpr = ROWS * OUTPUTS * (2 if GATED else 1)
    offset = tl.arange(0, ROWS)[:, None] * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    place = partial_sums + tile.to(tl.int64) * (SPLITS * width) + offset
    tl.store(place + part * width, sums)
    if GATED:
        tl.store(place + part * width + ROWS * OUTPUTS, up_sums)
    tl.debug_barrier()  # all threads' sums are written before the arrival is counted
    arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        tl.store(arrivals + tile, 0)
        sums = tl.load(place, cache_modifier=".cg")
        if GATED:
            up_sums = tl.load(place + ROWS * OUTPUTS, cache_modifier=".cg")
        for other in range(1, SPLITS):
            sums += tl.load(place + other * width, cache_modifier=".cg")
            if GATED:
                up_sums += tl.load(place + other * width + ROWS * OUTPUTS, cache_modifier=".cg")
    return sums, up_sums, tl.zeros([ROWS, OUTPUTS], tl.int32) + arrived == SPLITS - 1


def nearly_fill(num_rows: int, rows: int) -> bool:
    """Whether TMA loads the rows of x: it takes longer for zeros behind the last row than for rows."""
    return 4 * num_rows >= 3 * rows


def few_rows(
    x: torch.Tensor,  # [rows, depth]
    weight: torch.Tensor | Fp8Weight,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    tile: RowTile | None = None,
    x_scales: torch.Tensor | None = None,  # f32[rows, 1]  of x in FP8
    fixed: bool = False,  # results of a row do not depend on the number of rows
    change: Change | None = None,  # made by the kernel that was launched last
) -> torch.Tensor:
    """[rows, outputs]"""
    num_rows, depth = x.shape
    outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
    values, scales, group = parts_of(weight)
    described = can_be_described(x) and can_be_described(values)
    if tile is None:
        choose = fixed_tile if fixed else few_rows_tile
        tile = choose(num_rows, outputs, depth, x.dtype, gated=activation is not None, described=described)
    if 0 < group < depth:
        tile = replace(tile, depth=min(tile.depth, group))
    if tile.described and not described:
        tile = replace(tile, described=False)
    rows = min(max(16, triton.next_power_of_2(num_rows)), tile.rows)
    if fixed:
        rows = tile.rows
    by_copy_engine = tile.described and nearly_fill(num_rows, rows)
    out = torch.empty((num_rows, outputs), dtype=out_dtype or x.dtype, device=x.device)
    grid = triton.cdiv(outputs, tile.outputs), triton.cdiv(num_rows, rows), tile.splits
    _few_rows_kernel[grid](
        describe(x, rows, tile.depth) if by_copy_engine else x,
        describe(values, tile.outputs, tile.depth) if tile.described else values,
        scales,
        scales if x_scales is None else x_scales,
        values if bias is None else bias,
        x if residual is None else residual,
        out,
        *shared_tiles(grid, rows * tile.outputs * (1 if activation is None else 2), out),
        num_rows=num_rows,
        num_outputs=outputs,
        x_stride=x.stride(0),
        **adapter_changes.arguments(change, out),
        PIECES=adapter_changes.PIECES,
        DEPTH=depth,
        SPLITS=tile.splits,
        ROWS=rows,
        OUTPUTS=tile.outputs,
        BLOCK=tile.depth,
        STAGES=tile.stages,
        **fused(bias, residual, activation),
        SWAPPED=tile.swapped,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        GROUP=group,
        X_SCALED=x_scales is not None,
        DESCRIBED=tile.described,
        X_DESCRIBED=by_copy_engine,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OVERLAPPED,
    )
    return out


def shared_tiles(grid: tuple[int, int, int], width: int, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for split-K: (partial sums of every program, a counter for each tile); unused without it."""
    if grid[2] == 1:
        return out, out
    tiles = grid[0] * grid[1]
    counters = _arrivals.get(out.device)
    if counters is None or len(counters) < tiles:
        counters = torch.zeros(max(tiles, 4096), dtype=torch.int32, device=out.device)
        _arrivals[out.device] = counters
        _kept.append(counters)
    return torch.empty(tiles * grid[2] * width, dtype=torch.float32, device=out.device), counters


_arrivals: dict[
    torch.device, torch.Tensor
] = {}  # shared by all launches: a kernel starts to count after those before it ended
_kept: list[torch.Tensor] = []  # CUDA graphs keep using the counters they were captured with
