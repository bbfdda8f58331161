# mypy: disallow-untyped-decorators=False
"""Attention of each query to positions of its own, over one head of keys which are the values (latents).

    query i   |<- up to top_k positions: all that it sees, or those that an indexer chose ->|
              |<- piece 0 ->|<- piece 1 ->| ...       merged in this order by a second kernel

A program reads the latents of a piece from the blocks of the cache, once for `ROWS` heads, which are the rows of matrix
products. A latent of 576 values is read as 64 and 512: tiles are powers of two. The number of pieces depends on the
number of queries, in deterministic mode on `top_k` alone, and no result on the order in which programs end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import AttentionShape, Storage
from bifolio.kernels.triton.latents import latent_sizes, latent_tile, mix_latents
from bifolio.kernels.triton.pass_rows import PassRows
from bifolio.kernels.triton.tiles import in_product_type, product_dtype, score_constants

FIXED_PIECE = 512  # positions of a piece in deterministic mode
MOST_PARTS = 1 << 26  # values of pieces that are stored at once


@triton.jit(
    do_not_specialize=["query_stride", "table_stride"],
    do_not_specialize_on_alignment=["tables", "table_rows", "seen", "chosen"],
)
def _chosen_kernel(
    query: tl.tensor,  # [n, heads, dim], rows `query_stride` apart
    keys: tl.tensor,  # [blocks, 1, block_size, dim]
    tables: tl.tensor,  # i32[rows, blocks]
    table_rows: tl.tensor,  # i32[n]
    seen: tl.tensor,  # i32[n]
    chosen: tl.tensor,  # i32[n, TOP_K]
    mixed_parts: tl.tensor,  # f32[n, SPLITS, heads, dim]
    weight_parts: tl.tensor,  # f32[n, SPLITS, heads]  log2 of the sum of weights
    out: tl.tensor,  # [n, heads, dim]  written if SPLITS is 1
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,  # times log2(e)
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,  # values before the last LAST_BLOCK
    FIRST_BLOCK: tl.constexpr,
    LAST_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    PIECE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    GROUPS: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    row = (tl.program_id(0) // GROUPS).to(tl.int64)
    head = tl.program_id(0) % GROUPS * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(1)
    visible = tl.load(seen + row)
    end = tl.minimum(tl.minimum(visible, TOP_K), (piece + 1) * PIECE)
    picks_end = tl.where(visible > TOP_K, end, 0)
    first, last = tl.arange(0, FIRST_BLOCK), FIRST + tl.arange(0, LAST_BLOCK)
    exists = (head < HEADS)[:, None]
    has_first, has_last = exists & (first < FIRST)[None, :], exists & (last < DIM)[None, :]
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, LAST_BLOCK], tl.float32)
    mixed_first = tl.zeros([ROWS, FIRST_BLOCK], tl.float32)
    if piece * PIECE < end:
        table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
        own = query + row * query_stride + head[:, None] * DIM
        q = in_product_type(tl.load(own + last[None, :], mask=has_last, other=0.0), keys)
        q_first = in_product_type(tl.load(own + first[None, :], mask=has_first, other=0.0), keys)
        highest, total, mixed, mixed_first = mix_latents(
            q, q_first, keys, table, chosen + row * TOP_K, piece * PIECE, end, end + tl.zeros([ROWS], tl.int32),
            picks_end, scale, first, last, ROWS, DIM, FIRST, FIRST_BLOCK, LAST_BLOCK, BLOCK_SIZE, TILE, STAGES,
            PRECISION, True,
        )  # fmt: skip
    total = tl.where(end > piece * PIECE, total, 1.0)  # padding has no weights, and its result is 0
    share = 1.0 / total
    part = row * HEADS + head
    target = out
    if SPLITS > 1:
        part = (row * SPLITS + piece) * HEADS + head
        target = mixed_parts
        tl.store(weight_parts + part, highest + tl.log2(total), mask=head < HEADS)
    place = target + part[:, None] * DIM
    tl.store(place + last[None, :], (mixed * share[:, None]).to(target.dtype.element_ty), mask=has_last)
    if FIRST > 0:
        tl.store(place + first[None, :], (mixed_first * share[:, None]).to(target.dtype.element_ty), mask=has_first)


@triton.jit(do_not_specialize_on_alignment=["seen"])
def _merge_kernel(
    seen: tl.tensor,
    mixed_parts: tl.tensor,
    weight_parts: tl.tensor,
    out: tl.tensor,  # [n, heads, dim]
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    PIECE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
) -> None:
    """The pieces of one head of a query."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    used = (tl.minimum(tl.load(seen + row), TOP_K) + PIECE - 1) // PIECE
    piece, dim = tl.arange(0, SPLITS_BLOCK), tl.arange(0, DIM_BLOCK)
    part = (row * SPLITS + piece) * HEADS + head
    weight = tl.load(weight_parts + part, mask=piece < used, other=-float("inf"))
    highest = tl.max(weight, axis=0)
    shares = tl.exp2(weight - tl.where(used > 0, highest, 0.0))
    total = tl.sum(shares, axis=0)
    real = (piece < used)[:, None] & (dim < DIM)[None, :]
    values = tl.load(mixed_parts + part[:, None] * DIM + dim[None, :], mask=real, other=0.0)
    mixed = tl.sum(values * shares[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + (row * HEADS + head) * DIM + dim, mixed.to(out.dtype.element_ty), mask=dim < DIM)


def pieces_of(top_k: int, programs: int, num_processors: int, positions: int, *, fixed: bool) -> int:
    """Positions of a piece: those that fill the device, a multiple of a tile's."""
    tiles = -(-top_k // positions)
    if fixed:
        return min(FIXED_PIECE, tiles * positions)
    wanted = max(2 * num_processors // max(programs, 1), 1)  # pieces of a query
    return max(-(-tiles // wanted), min(2, tiles)) * positions


def chosen_attention(
    query: torch.Tensor,  # [t, heads, dim]
    chosen: torch.Tensor,  # i32[t, top_k]
    shape: AttentionShape,
    storage: Storage,
    rows: PassRows,
    *,
    num_processors: int,
    fixed: bool,  # sums do not depend on the number of queries
) -> torch.Tensor:
    """[t, heads * dim]: 0 for padding."""
    count, heads, dim = query.shape
    keys = storage.keys[shape.layer]
    tile = latent_tile(heads, product_dtype(query.dtype, keys.dtype))
    groups, top_k = triton.cdiv(heads, tile.rows), chosen.shape[1]
    piece = pieces_of(top_k, count * groups, num_processors, tile.positions, fixed=fixed)
    splits = triton.cdiv(top_k, piece)
    out = torch.empty((count, heads * dim), dtype=query.dtype, device=query.device)
    at_once = count if splits == 1 else max(MOST_PARTS // (splits * heads * dim), 1)
    room = (min(count, at_once), splits, heads, dim) if splits > 1 else (1,)
    mixed = torch.empty(room, dtype=torch.float32, device=query.device)
    weight = torch.empty(room[:3], dtype=torch.float32, device=query.device)
    sizes = {"HEADS": heads, "TOP_K": top_k, "PIECE": piece, "SPLITS": splits}
    for start in range(0, count, at_once):
        part = slice(start, min(start + at_once, count))
        seen, own = rows.seen[part], out[part]
        _chosen_kernel[(len(seen) * groups, splits)](
            query[part],
            keys,
            rows.tables,
            rows.table_rows[part],
            seen,
            chosen[part],
            mixed,
            weight,
            own,
            query.stride(0),
            rows.tables.stride(0),
            score_constants(shape)[0],
            **sizes,
            **latent_sizes(dim),
            ROWS=tile.rows,
            BLOCK_SIZE=storage.block_size,
            TILE=tile.positions,
            STAGES=tile.stages,
            PRECISION="ieee",
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        if splits > 1:
            _merge_kernel[(len(seen), heads)](
                seen, mixed, weight, own, **sizes, DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim),
                SPLITS_BLOCK=triton.next_power_of_2(splits), num_warps=4 if splits <= 8 else 8,
            )  # fmt: skip
    return out
