# mypy: disallow-untyped-decorators=False
"""Reading latents: one head of keys which are the values, in the blocks of the cache.

A tile of latents is read once for `ROWS` rows, which are heads of one query or of several. A latent of 576 values is
read as 64 and 512, since tiles are powers of two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MIN_ROWS = 16  # of a matrix product
MOST_ROWS = 64  # whose queries and results fit beside tiles of large latents


class LatentTile(NamedTuple):
    """Sizes of a program."""

    rows: int  # heads
    positions: int
    warps: int
    stages: int


def latent_tile(rows: int, dtype: torch.dtype) -> LatentTile:
    """Return the tile for this number of rows of queries or more, in the type of products."""
    if dtype == torch.float32:
        return LatentTile(MIN_ROWS, 16, 4, 1)
    rows = min(max(triton.next_power_of_2(rows), MIN_ROWS), MOST_ROWS)
    return LatentTile(rows, 64, 8, 2) if rows == MOST_ROWS else LatentTile(rows, 32, 4, 2)


def latent_sizes(dim: int) -> dict[str, int]:
    """Constants of the kernels: a latent is its first values, and the last, whose number is a power of two."""
    last = 1 << (dim.bit_length() - 1)
    return {
        "DIM": dim,
        "FIRST": dim - last,
        "FIRST_BLOCK": max(16, triton.next_power_of_2(dim - last)),
        "LAST_BLOCK": max(16, last),
    }


@triton.jit
def mix_latents(
    q: tl.tensor,  # [rows, LAST_BLOCK]
    q_first: tl.tensor,  # [rows, FIRST_BLOCK]
    keys: tl.tensor,  # [blocks, 1, block_size, dim]
    table: tl.tensor,  # i32[...]  of one sequence
    chosen: tl.tensor,  # i32[...]  positions of the places before `picks_end`, if CHOOSES
    begin: tl.tensor,
    end: tl.tensor,  # places from here on are not read
    limits: tl.tensor,  # i32[rows]  places that each row sees
    picks_end: tl.tensor,  # 0: each place is its own position
    scale: tl.tensor,  # times log2(e)
    first: tl.tensor,
    last: tl.tensor,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,  # values before the last LAST_BLOCK
    FIRST_BLOCK: tl.constexpr,
    LAST_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CHOOSES: tl.constexpr,
) -> tl.tensor:
    """The online softmax over the places from `begin` to `end`: (highest, total, mixed, mixed_first)."""
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, LAST_BLOCK], tl.float32)
    mixed_first = tl.zeros([ROWS, FIRST_BLOCK], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        offset = tl.arange(0, TILE)
        place = start + offset
        inside = place < end
        if CHOOSES or BLOCK_SIZE % TILE != 0:
            position = place
            if CHOOSES:
                picked = tl.load(chosen + place, mask=place < picks_end, other=0)
                position = tl.where(picks_end > 0, picked, place)
            blocks = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            source = keys + (blocks * BLOCK_SIZE + position % BLOCK_SIZE)[:, None] * DIM
        else:  # the tile lies in one block
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            source = keys + (block * BLOCK_SIZE + start % BLOCK_SIZE) * DIM + (offset * DIM)[:, None]
        if LAST_BLOCK == DIM - FIRST:
            real_last = inside[:, None] & (last >= 0)[None, :]
        else:
            real_last = inside[:, None] & (last < DIM)[None, :]
        k = tl.load(source + last[None, :], mask=real_last, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if FIRST > 0:
            real = inside[:, None] & (first < FIRST)[None, :]
            k_first = tl.load(source + first[None, :], mask=real, other=0.0).to(q.dtype)
            scores = tl.dot(q_first, tl.trans(k_first), scores, input_precision=PRECISION)
        scores = tl.where(place[None, :] < limits[:, None], scores * scale, -float("inf"))
        highest_now = tl.maximum(highest, tl.max(scores, axis=1))
        safe = tl.where(highest_now == -float("inf"), 0.0, highest_now)  # a row that sees no place yet
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(highest - safe)
        highest, total = highest_now, total * shrink + tl.sum(weights, axis=1)
        mixed = tl.dot(weights.to(q.dtype), k, mixed * shrink[:, None], input_precision=PRECISION)
        if FIRST > 0:
            mixed_first = mixed_first * shrink[:, None]
            mixed_first = tl.dot(weights.to(q.dtype), k_first, mixed_first, input_precision=PRECISION)
    return highest, total, mixed, mixed_first
