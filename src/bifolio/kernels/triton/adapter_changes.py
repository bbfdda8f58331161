# mypy: disallow-untyped-decorators=False
"""The changes of adapters, added by the kernel of the product that they change.

    y[row] += thin[row] @ up.T + bias        `thin` is x @ down.T (`adapters.shrink`), launched just before the product

The product multiplies meanwhile, and waits for `thin` behind its own sums. The `up` matrices of the adapters of a batch
lie side by side as pieces of `RANKS` columns; a row has zeros in the columns of other adapters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

RANKS = 16  # columns of a piece; ranks are padded to multiples of it
PIECES = 8  # multiplied at once
MOST_PARTS = 16  # of a product
NO_BIAS = -(1 << 62)  # place of a missing bias; a place in front of `base` is negative
ABSENT = tl.constexpr(NO_BIAS)
PIECE = tl.constexpr(RANKS)
PARTS = tl.constexpr(MOST_PARTS)


@dataclass(frozen=True, slots=True)
class Change:
    """The change of a product of several rows, for its kernel, which is launched just behind `shrink`."""

    thin: torch.Tensor  # [parts, rows, width]
    base: torch.Tensor  # as those of `adapters.GroupedRows`
    table: torch.Tensor
    groups: torch.Tensor
    members: torch.Tensor
    starts: torch.Tensor  # i32[MOST_PARTS]  first column of each part
    first_entry: int


def arguments(change: Change | None, unused: torch.Tensor) -> dict[str, torch.Tensor | int]:
    """Of a kernel that adds changes, or none."""
    names = "thin", "base", "table", "groups", "members", "starts"
    if change is None:
        return {**dict.fromkeys(names, unused), "first_entry": 0, "num_entries": 0, "WIDTH": 0}
    return {
        **{name: getattr(change, name) for name in names}, "first_entry": change.first_entry,
        "num_entries": change.table.shape[1], "WIDTH": change.thin.shape[2],
    }  # fmt: skip


@triton.jit
def places(table: tl.tensor, adapter: tl.tensor, entry: tl.tensor, num_entries: tl.tensor) -> tl.tensor:
    """(place of `up`, place of the bias, rank) of a part; of several adapters, too."""
    has_adapter = adapter >= 0
    found = table + (tl.maximum(adapter, 0).to(tl.int64) * num_entries + entry) * 4
    up = tl.multiple_of(tl.load(found + 1, mask=has_adapter, other=0), 16)
    bias = tl.load(found + 2, mask=has_adapter, other=ABSENT)
    return up, bias, tl.multiple_of(tl.load(found + 3, mask=has_adapter, other=0), 16)


@triton.jit
def part_at(starts: tl.tensor, column: tl.tensor) -> tl.tensor:
    """(part of a product that has this column, its first column)"""
    start = tl.load(starts + tl.arange(0, PARTS))
    begun = start <= column
    return tl.sum(begun.to(tl.int32), axis=0) - 1, tl.max(tl.where(begun, start, 0), axis=0)


@triton.jit
def adapters_at(
    groups: tl.tensor, first: tl.tensor, num_rows: tl.tensor, WIDTH: tl.constexpr, PIECES: tl.constexpr
) -> tl.tensor:
    """i32[pieces]: the adapters of the pieces from `first` on; -1: there are no more."""
    group = (first + tl.arange(0, PIECES)) // (WIDTH // PIECE)
    return tl.load(groups + group, mask=group < num_rows, other=-1)


@triton.jit
def up_tile(
    base: tl.tensor,
    up: tl.tensor,  # i64[pieces]  places
    own_rank: tl.tensor,  # of the adapter of each piece
    first: tl.tensor,  # piece
    output: tl.tensor,  # i32[outputs]  in the part
    output_exists: tl.tensor,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tensor:
    """[outputs, pieces * RANKS]"""
    rank = _ranks(first, WIDTH, PIECES)
    source = base + up[None, :, None] + output.to(tl.int64)[:, None, None] * own_rank[None, :, None] + rank[None]
    exists = (rank < own_rank[:, None])[None]
    weights = tl.load(source, mask=output_exists[:, None, None] & exists, other=0.0)
    return tl.reshape(weights, [output.shape[0], PIECES * PIECE])


@triton.jit
def _ranks(first: tl.tensor, WIDTH: tl.constexpr, PIECES: tl.constexpr) -> tl.tensor:
    """i32[pieces, RANKS]: the ranks in the pieces from `first` on."""
    piece = first + tl.arange(0, PIECES)
    return (piece % (WIDTH // PIECE) * PIECE)[:, None] + tl.arange(0, PIECE)[None, :]


@triton.jit
def _thin_tile(
    thin: tl.tensor,  # pointers [rows, 1, 1]
    member: tl.tensor,  # i32[rows]
    own_rank: tl.tensor,
    first: tl.tensor,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
) -> tl.tensor:
    """[rows, pieces * RANKS]: zeros in the pieces of other adapters."""
    rank = _ranks(first, WIDTH, PIECES)
    is_own = member[:, None] == ((first + tl.arange(0, PIECES)) // (WIDTH // PIECE))[None, :]
    exists = (rank < own_rank[:, None])[None]
    values = tl.load(thin + rank[None], mask=is_own[:, :, None] & exists, other=0.0)
    return tl.reshape(values, [member.shape[0], PIECES * PIECE])


@triton.jit
def added_changes(
    thin: tl.tensor,  # [parts, rows, width]
    base: tl.tensor,
    table: tl.tensor,
    groups: tl.tensor,
    entry: tl.tensor,
    num_entries: tl.tensor,
    part: tl.tensor,
    first_weights: tl.tensor,  # `up_tile` of the first pieces
    own_rank: tl.tensor,  # as the next one of the first pieces
    bias: tl.tensor,
    num_groups: tl.tensor,
    row: tl.tensor,  # i32[rows]
    member: tl.tensor,  # i32[rows]  group; below 0: none
    output: tl.tensor,
    output_exists: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    PIECES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """f32[rows, outputs]: the changes of these rows and outputs. Earlier kernels are complete."""
    own_thin = thin + (part * num_rows + row)[:, None, None] * WIDTH
    values = _thin_tile(own_thin, member, own_rank, 0, WIDTH, PIECES)
    total = tl.dot(values, tl.trans(first_weights), input_precision=PRECISION)
    has_bias = tl.max((bias != ABSENT).to(tl.int32), axis=0)
    num_pieces = num_groups * (WIDTH // PIECE)
    if (
        num_pieces > PIECES
    ):  # places are read before they are needed, those of adapters one tile, adapters two tiles ahead
        adapter = adapters_at(groups, PIECES, num_rows, WIDTH, PIECES)
        up, bias, own_rank = places(table, adapter, entry, num_entries)
        adapter = adapters_at(groups, 2 * PIECES, num_rows, WIDTH, PIECES)
        for first in tl.range(PIECES, num_pieces, PIECES):
            has_bias = tl.maximum(has_bias, tl.max((bias != ABSENT).to(tl.int32), axis=0))
            weights = up_tile(base, up, own_rank, first, output, output_exists, WIDTH, PIECES)
            values = _thin_tile(own_thin, member, own_rank, first, WIDTH, PIECES)
            up, bias, own_rank = places(table, adapter, entry, num_entries)
            adapter = adapters_at(groups, first + 2 * PIECES, num_rows, WIDTH, PIECES)
            total = tl.dot(values, tl.trans(weights), total, input_precision=PRECISION)
    if has_bias > 0:
        own = tl.load(groups + member, mask=member >= 0, other=-1)
        _, own_bias, _ = places(table, own, entry, num_entries)
        is_biased = (own_bias != ABSENT)[:, None] & output_exists[None, :]
        total += tl.load(base + own_bias[:, None] + output[None, :], mask=is_biased, other=0.0).to(tl.float32)
    return total
