# mypy: disallow-untyped-decorators=False
"""The order in which grouped products read tokens: by expert, in tiles of one expert each.

    pairs   (token, choice), ordered by expert; those of one expert by token
    tiles   |<- expert 0 ->|<- expert 0, padded ->|<- expert 3, padded ->|   at most `rows` pairs of one expert each

The number of tiles is an upper bound that follows from the number of pairs, so that a CUDA graph can hold the launches;
tiles behind the last one name no expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs

BLOCKS = (512, 2048)  # pairs that a program reads at once
FILLED = 128  # tiles that a program writes at once


class Tiles(NamedTuple):
    """The pairs of a batch in tiles of one expert each."""

    pairs: torch.Tensor  # i32[pairs]  token * top_k + choice, ordered by expert
    expert: torch.Tensor  # i32[tiles]  the number of experts: the tile is empty
    begin: torch.Tensor  # i32[tiles]  first of its pairs, in their order
    end: torch.Tensor  # i32[tiles]
    rows: int  # pairs of a full tile


@triton.jit(do_not_specialize=["num_pairs", "num_experts", "num_tiles", "rows"])
def _order_kernel(
    experts: tl.tensor,  # i32[pairs]
    pairs: tl.tensor,
    tile_expert: tl.tensor,
    tile_begin: tl.tensor,
    tile_end: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    num_tiles: tl.tensor,
    rows: tl.tensor,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,  # more than experts: the others count the padding, which would contend for a single one
    FILLED: tl.constexpr,
) -> None:
    """One program for each expert: it counts all pairs and writes its own."""
    own = tl.program_id(0)
    number = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    wait_for_inputs()
    for start in range(0, num_pairs, BLOCK):
        place = start + tl.arange(0, BLOCK)
        expert = tl.load(experts + place, mask=place < num_pairs, other=0)
        padding = num_experts + place % (BINS - num_experts)
        counts += tl.histogram(tl.where(place < num_pairs, expert, padding), BINS)
    counts = tl.where(number < num_experts, counts, 0)
    tiles = (counts + rows - 1) // rows
    begin = tl.sum(tl.where(number < own, counts, 0), axis=0)
    end = begin + tl.sum(tl.where(number == own, counts, 0), axis=0)
    first_tile = tl.sum(tl.where(number < own, tiles, 0), axis=0)
    last_tile = first_tile + tl.sum(tl.where(number == own, tiles, 0), axis=0)
    at = begin
    if end > begin:
        for start in range(0, num_pairs, BLOCK):
            place = start + tl.arange(0, BLOCK)
            mine = tl.load(experts + place, mask=place < num_pairs, other=BINS - 1) == own
            rank = tl.cumsum(mine.to(tl.int32), axis=0)
            tl.store(pairs + at + rank - 1, place, mask=mine)
            at += tl.sum(mine.to(tl.int32), axis=0)
        for first in range(first_tile, last_tile, FILLED):
            tile = first + tl.arange(0, FILLED)
            start_at = begin + (tile - first_tile) * rows
            tl.store(tile_expert + tile, tile * 0 + own, mask=tile < last_tile)
            tl.store(tile_begin + tile, start_at, mask=tile < last_tile)
            tl.store(tile_end + tile, tl.minimum(start_at + rows, end), mask=tile < last_tile)
    if own == num_experts - 1:
        for first in range(last_tile, num_tiles, FILLED):
            tile = first + tl.arange(0, FILLED)
            tl.store(tile_expert + tile, tile * 0 + num_experts, mask=tile < num_tiles)


def cut_pairs(experts: torch.Tensor, num_experts: int, rows: int) -> Tiles:
    """Order the pairs by expert and cut them into tiles; shapes follow from the number of pairs."""
    count = experts.numel()
    most = min(count, count // rows + num_experts)
    integers = torch.empty(count + 3 * most, dtype=torch.int32, device=experts.device)
    expert, begin, end = integers[count:].view(3, most)
    tiles = Tiles(integers[:count], expert, begin, end, rows)
    block = next((size for size in BLOCKS if count <= size), BLOCKS[-1])
    _order_kernel[(num_experts,)](
        experts, tiles.pairs, expert, begin, end, count, num_experts, most, rows, BLOCK=block,
        BINS=triton.next_power_of_2(num_experts + 1), FILLED=FILLED, num_warps=4, **OVERLAPPED,
    )  # fmt: skip
    return tiles
