"""Tile sizes of products with few rows, and the choice between our kernels and cuBLAS, as measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

MOST_ROWS = 64  # limit of our own kernels
MOST_GATED_ROWS = 128  # the limit for gate and up projection, where the fused activation saves a pass
INTERPRETED = bool(triton.knobs.runtime.interpret)  # a program costs milliseconds then: few, large ones


@dataclass(frozen=True, slots=True)
class RowTile:
    """Tile sizes of one product shape."""

    outputs: int  # rows of the weight per program
    depth: int  # columns of the weight per tile
    warps: int
    stages: int = 1
    swapped: bool = False  # the weight is the left factor
    splits: int = 1  # split-K: programs that share the depth of a tile
    described: bool = False  # loaded by TMA, where the device has it
    rows: int = MOST_ROWS  # of x per program, at most


def most_rows(gated: bool) -> int:
    return MOST_GATED_ROWS if gated else MOST_ROWS


def one_row_tile(outputs: int, depth: int, gated: bool) -> RowTile:
    """Tiles of 4 to 32 kB and several programs per multiprocessor; the fastest in a chain of all products of a step."""
    if INTERPRETED:
        return RowTile(64, 64, 4)
    if outputs >= 32768:
        return RowTile(16, 256, 4) if depth <= 2048 else RowTile(8, 512, 4, 4)
    if gated:
        return RowTile(4, 512, 2) if depth <= 2048 else RowTile(2, 4096, 8)
    if depth > 2048 and outputs <= 2048:
        return RowTile(2, 4096, 8)
    if depth >= 8192:
        return RowTile(1, 4096, 8)
    if depth <= 1024:
        return RowTile(8, 512, 4)
    if outputs <= 2048:
        return RowTile(2, 2048, 8) if outputs > 1024 else RowTile(2, 1024, 4)
    if outputs <= 4096 <= depth:
        return RowTile(4, 512, 4)
    return RowTile(4 if depth <= 2048 else 2, 1024, 4)


def few_rows_tile(
    rows: int, outputs: int, depth: int, dtype: torch.dtype, *, gated: bool = False, described: bool = False
) -> RowTile:
    """Products of a few hundred outputs use split-K until there is one program per multiprocessor.

    `described`: TMA can load both factors; it is used where it measured faster (17 rows and more).
    """
    if INTERPRETED:
        return RowTile(64, 64, 4)
    if dtype == torch.float32:
        return RowTile(16, 32, 4, 2)
    if described and 16 < rows <= most_rows(gated) and outputs >= _fewest_described(rows, gated):
        return _described_tile(rows, outputs, depth, gated)
    if outputs >= 32768:
        return RowTile(128, 64, 4, 4, swapped=True)
    swapped = depth > 3072 or outputs > 4096
    tile = 64 if swapped else 32
    splits = max(min(128 // triton.cdiv(outputs, tile), 4, depth // 256), 1)
    return RowTile(tile, 128, 4, 4, swapped, splits)


def _fewest_described(rows: int, gated: bool) -> int:
    """Outputs below which the tiles that TMA needs to be faster are too few for the GPU."""
    if gated:
        return 3072 if rows > 32 else 4097
    return 2048 if rows > 32 else 3072


def _described_tile(rows: int, outputs: int, depth: int, gated: bool) -> RowTile:
    """One program per multiprocessor, or per two where split-K would leave too little work to each."""
    if outputs >= 32768:
        return RowTile(128, 64, 4, 4 if rows > 32 else 5, swapped=True, described=True)
    if rows > MOST_ROWS and outputs <= 4096:  # gate and up projection
        return RowTile(32, 128, 4, 4, described=True, rows=MOST_GATED_ROWS)
    if rows > MOST_ROWS:
        return RowTile(64, 64, 4, 5, swapped=True, described=True, rows=MOST_GATED_ROWS)
    if rows > 32 and outputs <= 4096:  # twice the programs; the weight tile is the smaller, right factor
        splits = 2 if outputs <= 2048 and depth > 4096 else 1
        return RowTile(32, 128, 4, 4 if gated else 8, splits=1 if gated else splits, described=True)
    if gated:
        return RowTile(64, 128, 4, 4, swapped=rows <= 32, described=True)
    splits = triton.cdiv(128 if depth > 4096 else 64, triton.cdiv(outputs, 64))
    splits = max(min(splits, 4, depth // 256), 1)
    return RowTile(64, 128, 4, 5 if splits < 4 else 4, swapped=True, splits=splits, described=True)


def library_is_faster(rows: int, outputs: int, depth: int, *, gated: bool, described: bool) -> bool:
    """Whether cuBLAS is faster than our kernel with its fused operations.

    `described`: TMA can load our factors; then our kernel is faster up to its limit of rows.
    """
    if rows > MOST_ROWS:
        return not described or rows > most_rows(gated) or outputs < _fewest_described(rows, gated)
    return rows > 32 and not gated and not described and 2048 <= depth <= outputs < 32768


def fixed_tile(rows: int, outputs: int, depth: int, dtype: torch.dtype, *, gated: bool, described: bool) -> RowTile:
    """Tiles of deterministic mode, measured at 16 to 2048 rows: without split-K, each sum has one order.

    Tensor cores add the same products in the same order for every size and orientation of the tiles; only f32, which
    they do not multiply, has one size for any number of rows.
    """
    if INTERPRETED or dtype == torch.float32:
        return RowTile(64, 64, 4, rows=16) if INTERPRETED else RowTile(16, 32, 4, 2)
    few = max(16, triton.next_power_of_2(rows))
    if rows <= 16 and (gated or outputs >= 6144):
        tile = RowTile(64, 128, 4, 5, True)
    elif rows <= 16:
        tile = RowTile(16, 256, 2, 6)
    elif rows <= MOST_ROWS and (gated or outputs >= 6144):
        tile = RowTile(64, 128, 4, 4, True)
    elif rows <= MOST_ROWS:
        tile = RowTile(32 if outputs > 2048 else 16, 256, 4, 4)
    elif gated:
        few = 256 if outputs >= 8192 and rows > 128 else 64 if outputs < 8192 and rows < 128 else 128
        tile = RowTile(64, 64, 8 if few == 256 else 4, 4, True)
    elif outputs >= 32768 or (rows > 512 and triton.cdiv(outputs, 128) * triton.cdiv(rows, 256) >= 128):
        few = 256 if rows > 128 else 128
        tile = RowTile(128, 64, 8, 3, True)
    else:
        few = 128 if rows >= 128 else MOST_ROWS
        if rows > 512 or outputs >= 6144:
            tile = RowTile(128, 64, 8, 4, True)
        else:
            tile = RowTile(64, 64, 4, 5) if outputs > 2048 else RowTile(32, 128, 4, 4)
    return replace(tile, described=described, rows=few)
