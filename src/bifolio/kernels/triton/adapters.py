# mypy: disallow-untyped-decorators=False
"""Low-rank changes of products, for rows with different adapters in one pass: two kernels for each product.

    shrink   thin[part, row] = x[row] @ down.T       programs add up shares of the columns; the last one adds their sums
    expand   y[row] += thin[part, row] @ up.T + bias     or with the activation of gate and up behind it

Where the kernel of the product adds the changes itself (`adapter_changes`), there is no `expand`. Rows are grouped by
adapter: a tile is a few rows of one adapter, and a place is an index into the grouped rows.

    order    i32[rows]        row of each place
    tiles    i32[3, tiles]    adapter (-1: none), first place, number of places (0: the tile is unused)
    groups   i32[rows + 1]    adapter of each group; the last number is the number of groups
    members  i32[rows]        group of each row (-1: none)
    table    i64[adapters, entries, 4]   of each part of each product: places of `down`, `up` and the bias, in elements
                                         from `base`, and the rank, a multiple of 16 (0: the part is not changed)

The shares of a depth depend on the depth alone, and every sum is added in one order: the result of a row depends on
the row and its adapter alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bifolio.kernels.cuda.row_product import RowChange
from bifolio.kernels.triton.adapter_changes import ABSENT, MOST_PARTS, RANKS, Change, places
from bifolio.kernels.triton.gemm_small_m import shared_tiles
from bifolio.kernels.triton.norm import ACTIVATIONS, gated
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs

FEWEST_ROWS, MOST_ROWS = 16, 64  # of a tile
MANY_ROWS = 512  # of a pass, from which tiles are large
BLOCK, MOST_SHARES = 512, 16  # columns of x per tile of `shrink`; programs that share a depth, a power of two
OUTPUTS = 256  # columns of y per program of `expand`
SHRINKING, EXPANDING = 2112, 528  # programs that start at once, on a GPU of 132 multiprocessors
MOST_COLUMNS = 128  # of a tile of a product
NO_ACTIVATION = -1
BEHIND = 2**31 - 1  # a column behind all others


@dataclass(frozen=True, slots=True)
class ProductPlan:
    """One product of the network, for the kernels."""

    first_entry: int  # of its parts in the table
    widths: tuple[int, ...]  # outputs of its parts, side by side
    depth: int
    blocks: torch.Tensor  # i32[blocks, 4]  part, its width, first output in it, its first column
    starts: torch.Tensor  # i32[MOST_PARTS]  first column of each part; behind the last one no column is

    @classmethod
    def of(cls, first_entry: int, widths: tuple[int, ...], depth: int, device: str) -> ProductPlan:
        rows, column = [], 0
        for part, width in enumerate(widths):
            rows += [[part, width, start, column] for start in range(0, width, OUTPUTS)]
            column += width
        starts = [sum(widths[:part]) for part in range(len(widths))]
        starts += [BEHIND] * (MOST_PARTS - len(widths))
        arrays = (torch.tensor(values, dtype=torch.int32).to(device) for values in (rows, starts))
        return cls(first_entry, widths, depth, *arrays)

    def block(self, rows: int) -> int:
        """Columns of x per tile, for tiles with `rows` rows."""
        most = BLOCK if rows == FEWEST_ROWS else BLOCK // 4  # large ones would not fit into shared memory
        return min(max(1 << (self.depth - 1).bit_length(), FEWEST_ROWS), most)

    @property
    def share(self) -> int:
        """Columns of x that one program adds up."""
        block = self.block(FEWEST_ROWS)
        return -(-self.depth // (MOST_SHARES * block)) * block

    @property
    def is_aligned(self) -> bool:
        return all(width % 16 == 0 for width in self.widths)

    @property
    def is_tiled(self) -> bool:
        """Whether a tile of the columns of a product belongs to one part."""
        return len(self.widths) == 1 or (
            len(self.widths) <= MOST_PARTS and not any(n % MOST_COLUMNS for n in self.widths)
        )

    @property
    def is_gated(self) -> bool:
        """Whether gate and up are two parts, so that the activation can follow in the same kernel."""
        return len(self.widths) == 2 and self.widths[0] == self.widths[1]


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """The rows of a pass by adapter, on the device, and the matrices of the adapters."""

    base: torch.Tensor  # places in the table count from its first element
    table: torch.Tensor
    order: torch.Tensor
    tiles: torch.Tensor
    groups: torch.Tensor
    members: torch.Tensor
    width: int  # largest rank that a pass can have
    rows: int  # of a tile, at most


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "first_entry", "num_entries"])
def _shrink_kernel(
    x: tl.tensor,  # [rows, depth]
    base: tl.tensor,
    table: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    thin: tl.tensor,  # [parts, rows, width]
    partial_sums: tl.tensor,  # f32[tiles, columns of `thin` / RANKS, splits, rows of a tile, RANKS]
    arrivals: tl.tensor,  # i32[tiles, columns of `thin` / RANKS]  0 between two launches
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    x_stride: tl.tensor,
    first_entry: tl.tensor,
    num_entries: tl.tensor,
    DEPTH: tl.constexpr,
    SHARE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    split = tl.program_id(1)
    part, first_rank = tl.program_id(0) // (WIDTH // RANKS), tl.program_id(0) % (WIDTH // RANKS) * RANKS
    begin = split * SHARE
    end = tl.minimum(begin + SHARE, DEPTH)
    member, rank = tl.arange(0, ROWS), first_rank + tl.arange(0, RANKS)
    column = begin + tl.arange(0, BLOCK)
    inside = column < end
    tile = tl.program_id(2)  # programs with work are the first ones: on different multiprocessors
    adapter, first, count = _tile(tiles, tile, num_tiles)  # tiles and table are complete before the first layer
    source, own_rank = _down(base, table, adapter, first_entry + part, num_entries, rank, DEPTH)
    weights = tl.load(source + column[None, :], mask=inside[None, :] & (rank < own_rank)[:, None], other=0.0)
    if count > 0 or tile == 0:  # others end at once; the next kernel may start when the inputs are there
        wait_for_inputs()
    while count > 0:
        if first_rank < own_rank:
            exists = member < count
            place = first + member
            row = tl.load(order + place, mask=exists, other=0)
            x_source = x + row.to(tl.int64)[:, None] * x_stride
            values = tl.load(x_source + column[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
            total = tl.dot(values, tl.trans(weights), input_precision=PRECISION)
            if SHARE > BLOCK:
                for start in tl.range(begin + BLOCK, end, BLOCK):
                    later = start + tl.arange(0, BLOCK)
                    values = tl.load(
                        x_source + later[None, :], mask=exists[:, None] & (later < end)[None, :], other=0.0
                    )
                    weights = tl.load(source + later[None, :], mask=(later < end)[None, :], other=0.0)
                    total = tl.dot(values, tl.trans(weights), total, input_precision=PRECISION)
            is_last = exists
            if SPLITS > 1:
                sums = tile * tl.num_programs(0) + tl.program_id(0)
                total, arrived = _add_shares(total, partial_sums, arrivals, sums, split, SPLITS)
                is_last = exists & (member * 0 + arrived == SPLITS - 1)
            target = thin + (part.to(tl.int64) * num_rows + row)[:, None] * WIDTH + rank[None, :]
            tl.store(target, total.to(thin.dtype.element_ty), mask=is_last[:, None])
        tile += tl.num_programs(2)
        adapter, first, count = _tile(tiles, tile, num_tiles)
        source, own_rank = _down(base, table, adapter, first_entry + part, num_entries, rank, DEPTH)
        weights = tl.load(source + column[None, :], mask=inside[None, :] & (rank < own_rank)[:, None], other=0.0)


@triton.jit
def _add_shares(
    total: tl.tensor,  # f32[rows, ranks]  of this program
    partial_sums: tl.tensor,
    arrivals: tl.tensor,
    sums: tl.tensor,  # which of the sums
    split: tl.tensor,
    SPLITS: tl.constexpr,
) -> tl.tensor:
    """(the sums of all programs, for the last one; how many were there before this one)."""
    ROWS: tl.constexpr = total.shape[0]
    RANKS: tl.constexpr = total.shape[1]
    offset = tl.arange(0, ROWS)[:, None] * RANKS + tl.arange(0, RANKS)[None, :]
    source = partial_sums + sums.to(tl.int64) * (SPLITS * ROWS * RANKS) + offset
    tl.store(source + split * (ROWS * RANKS), total)
    tl.debug_barrier()  # all threads' sums are written before the arrival is counted
    arrived = tl.atomic_add(arrivals + sums, 1, sem="acq_rel", scope="gpu")
    if arrived == SPLITS - 1:
        tl.store(arrivals + sums, 0)
        total = tl.load(source, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            total += tl.load(source + other * (ROWS * RANKS), cache_modifier=".cg")
    return total, arrived


@triton.jit
def _tile(tiles: tl.tensor, tile: tl.tensor, num_tiles: tl.tensor) -> tl.tensor:
    """(adapter, first place, number of places) of a tile; no places behind the last one."""
    exists = tile < num_tiles
    adapter = tl.load(tiles + tile, mask=exists, other=-1)
    first = tl.load(tiles + num_tiles + tile, mask=exists, other=0)
    return adapter, first, tl.load(tiles + 2 * num_tiles + tile, mask=exists, other=0)


@triton.jit
def _down(
    base: tl.tensor,
    table: tl.tensor,
    adapter: tl.tensor,
    entry: tl.tensor,
    num_entries: tl.tensor,
    rank: tl.tensor,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    """(pointers to these rows of `down`, the rank of the part)"""
    has_adapter = adapter >= 0
    found = table + (tl.maximum(adapter, 0).to(tl.int64) * num_entries + entry) * 4
    down = tl.multiple_of(tl.load(found, mask=has_adapter, other=0), 16)
    own_rank = tl.load(found + 3, mask=has_adapter, other=0)
    return base + down + rank.to(tl.int64)[:, None] * DEPTH, own_rank


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "first_entry", "num_entries"])
def _expand_kernel(
    thin: tl.tensor,  # [parts, rows, width]
    base: tl.tensor,
    table: tl.tensor,
    order: tl.tensor,
    tiles: tl.tensor,
    blocks: tl.tensor,  # i32[blocks, 4]
    y: tl.tensor,  # [rows, columns]  changed in place, or read where there is an activation
    out: tl.tensor,  # [rows, width of the gate]
    num_rows: tl.tensor,
    num_tiles: tl.tensor,
    y_stride: tl.tensor,
    out_stride: tl.tensor,
    first_entry: tl.tensor,
    num_entries: tl.tensor,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of a gate, the first part; -1: none
    ALIGNED: tl.constexpr,  # columns of parts are multiples of 16
    PRECISION: tl.constexpr,
) -> None:
    block = blocks + tl.program_id(0) * 4
    part, part_width, first_output, column = tl.load(block), tl.load(block + 1), tl.load(block + 2), tl.load(block + 3)
    first_output = tl.multiple_of(first_output, 16)
    if ALIGNED:
        column, part_width = tl.multiple_of(column, 16), tl.multiple_of(part_width, 16)
    member = tl.arange(0, ROWS)
    output = first_output + tl.arange(0, OUTPUTS)
    written = output < part_width
    tile = tl.program_id(1)
    adapter, first, count = _tile(tiles, tile, num_tiles)
    up_place, bias, own_rank = places(table, adapter, first_entry + part, num_entries)
    weights = _weights(base, up_place, own_rank, output, written, 0, RANKS)  # they do not depend on earlier kernels
    if ACTIVATION >= 0:
        partner_place, partner_bias, partner_rank = places(table, adapter, first_entry + part + 1, num_entries)
        partner_weights = _weights(base, partner_place, partner_rank, output, written, 0, RANKS)
    wait_for_inputs()
    while count > 0:
        if ACTIVATION >= 0 or own_rank > 0:
            exists = member < count
            place = first + member
            row = tl.load(order + place, mask=exists, other=0).to(tl.int64)
            inside = exists[:, None] & written[None, :]
            target = y + row[:, None] * y_stride + (column + output)[None, :]
            values = tl.load(target, mask=inside, other=0.0).to(tl.float32)
            values += _change(
                thin, base, weights, up_place, bias, own_rank, part, row, exists, output, written, num_rows,
                RANKS, WIDTH, PRECISION,
            )  # fmt: skip
            if ACTIVATION >= 0:
                up = tl.load(target + part_width, mask=inside, other=0.0).to(tl.float32)
                up += _change(
                    thin, base, partner_weights, partner_place, partner_bias, partner_rank, part + 1, row, exists,
                    output, written, num_rows, RANKS, WIDTH, PRECISION,
                )  # fmt: skip
                values = gated(values, up, ACTIVATION)
                target = out + row[:, None] * out_stride + output[None, :]
                tl.store(target, values.to(out.dtype.element_ty), mask=inside)
            else:
                tl.store(target, values.to(y.dtype.element_ty), mask=inside)
        tile += tl.num_programs(1)
        adapter, first, count = _tile(tiles, tile, num_tiles)
        up_place, bias, own_rank = places(table, adapter, first_entry + part, num_entries)
        weights = _weights(base, up_place, own_rank, output, written, 0, RANKS)
        if ACTIVATION >= 0:
            partner_place, partner_bias, partner_rank = places(table, adapter, first_entry + part + 1, num_entries)
            partner_weights = _weights(base, partner_place, partner_rank, output, written, 0, RANKS)


@triton.jit
def _weights(
    base: tl.tensor,
    up: tl.tensor,
    own_rank: tl.tensor,
    output: tl.tensor,
    written: tl.tensor,
    first_rank: tl.tensor,
    RANKS: tl.constexpr,
) -> tl.tensor:
    """[outputs, ranks]: a part of `up`; zeros where the part is not changed."""
    rank = first_rank + tl.arange(0, RANKS)
    source = base + up + output.to(tl.int64)[:, None] * own_rank + rank[None, :]
    return tl.load(source, mask=written[:, None] & (rank < own_rank)[None, :], other=0.0)


@triton.jit
def _change(
    thin: tl.tensor,
    base: tl.tensor,
    weights: tl.tensor,  # [outputs, ranks]  the first ranks of `up`
    up: tl.tensor,
    bias: tl.tensor,
    own_rank: tl.tensor,
    part: tl.tensor,
    row: tl.tensor,  # i64[rows]
    exists: tl.tensor,
    output: tl.tensor,  # i32[outputs]
    written: tl.tensor,
    num_rows: tl.tensor,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """f32[rows, outputs]: the change of these outputs of a part."""
    rank = tl.arange(0, RANKS)
    source = thin + (part.to(tl.int64) * num_rows + row)[:, None] * WIDTH + rank[None, :]
    values = tl.load(source, mask=exists[:, None] & (rank < own_rank)[None, :], other=0.0)
    total = tl.dot(values, tl.trans(weights), input_precision=PRECISION)
    if WIDTH > RANKS:
        for start in tl.range(RANKS, own_rank.to(tl.int32), RANKS, num_stages=1):
            values = tl.load(source + start, mask=exists[:, None] & (start + rank < own_rank)[None, :], other=0.0)
            weights = _weights(base, up, own_rank, output, written, start, RANKS)
            total = tl.dot(values, tl.trans(weights), total, input_precision=PRECISION)
    added = tl.load(base + bias + output, mask=written & (output * 0 + bias != ABSENT), other=0.0).to(tl.float32)
    return total + added[None, :]


def shrink(x: torch.Tensor, plan: ProductPlan, grouped: GroupedRows) -> torch.Tensor:
    """[parts, rows, width], as x; defined at the ranks that the adapter of a row has."""
    num_rows, num_tiles, parts = x.shape[0], grouped.tiles.shape[1], len(plan.widths)
    splits = triton.cdiv(plan.depth, plan.share)
    thin = torch.empty((parts, num_rows, grouped.width), dtype=x.dtype, device=x.device)
    columns = parts * (grouped.width // RANKS)
    _shrink_kernel[(columns, splits, _side_by_side(num_tiles, columns * splits, SHRINKING))](
        x, grouped.base, grouped.table, grouped.order, grouped.tiles, thin,
        *shared_tiles((num_tiles, columns, splits), grouped.rows * RANKS, thin), num_rows, num_tiles, x.stride(0),
        plan.first_entry, grouped.table.shape[1], DEPTH=plan.depth, SHARE=plan.share, SPLITS=splits,
        BLOCK=plan.block(grouped.rows), ROWS=grouped.rows, RANKS=RANKS, WIDTH=grouped.width, PRECISION=_precision(x),
        num_warps=4, num_stages=2, **OVERLAPPED,
    )  # fmt: skip
    return thin


def expand(
    y: torch.Tensor, thin: torch.Tensor, plan: ProductPlan, grouped: GroupedRows, activation: str | None = None
) -> torch.Tensor:
    """y, changed in place; with an activation, which a gated plan can have, the activated rows."""
    num_rows, num_tiles = y.shape[0], grouped.tiles.shape[1]
    blocks, out, kind = len(plan.blocks), y, NO_ACTIVATION
    if activation is not None:
        blocks, kind = blocks // 2, ACTIVATIONS[activation]
        out = torch.empty((num_rows, plan.widths[0]), dtype=y.dtype, device=y.device)
    _expand_kernel[(blocks, _side_by_side(num_tiles, blocks, EXPANDING))](
        thin, grouped.base, grouped.table, grouped.order, grouped.tiles, plan.blocks, y, out, num_rows, num_tiles,
        y.stride(0), out.stride(0), plan.first_entry, grouped.table.shape[1], ROWS=grouped.rows,
        OUTPUTS=OUTPUTS, RANKS=RANKS, WIDTH=grouped.width, ACTIVATION=kind,
        ALIGNED=plan.is_aligned, PRECISION=_precision(grouped.base), num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    return out


def change_of(x: torch.Tensor, plan: ProductPlan, grouped: GroupedRows) -> Change:
    """The changes of the next product, whose kernel must be the next one that is launched."""
    thin = shrink(x, plan, grouped)
    return Change(thin, grouped.base, grouped.table, grouped.groups, grouped.members, plan.starts, plan.first_entry)


def row_change_of(plan: ProductPlan, grouped: GroupedRows) -> RowChange:
    """The changes of one row, all of which the kernel of the product computes."""
    return RowChange(
        grouped.base, grouped.table, grouped.groups, plan.starts, plan.first_entry, len(plan.widths), grouped.width
    )  # fmt: skip


def _side_by_side(num_tiles: int, programs: int, most: int) -> int:
    """Tiles that start at once, with `programs` programs each; one program takes several tiles in turn."""
    return max(1, min(num_tiles, most // programs))


def _precision(x: torch.Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"
