# mypy: disallow-untyped-decorators=False
"""Causal attention over cached latents: of the queries of a decode step, and of prompts.

    heads       | query 0 | query 1 | ... | query 15 |     of one tile of queries (`query_tiles`)
    programs    |<- 64 rows ->|<- 64 rows ->| ...    each over the latents that the tile's last query sees

All query heads attend to the one head of latents, so the rows of a program are heads of any queries of a tile. Decodes
read their contexts in the pieces of `split_kv`; prompts of few tokens in as many pieces as fill the device. A second
kernel merges the pieces of a query.

In deterministic mode pieces begin at multiples of `FIXED_PIECE` positions and are merged one after the other: those of
a decode by the second kernel, those of a prompt by the program itself, which keeps their sum in memory. Both phases run
the same compiled kernel, with tiles of the same size: a token gets the same bits in both.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import AttentionShape, Storage
from bifolio.kernels.triton.latents import MOST_ROWS, LatentTile, latent_sizes, latent_tile, mix_latents
from bifolio.kernels.triton.query_tiles import QueryTiles
from bifolio.kernels.triton.split_kv import Pieces
from bifolio.kernels.triton.tiles import LARGE_HEAD, in_product_type, join_part, product_dtype, score_constants

QUERIES = 16  # of a tile
FIXED_PIECE = 2048  # positions of a piece in deterministic mode
LEAST_PIECE = 512  # positions of a piece of a prompt
MOST_PARTS = 1 << 26  # values of pieces that are stored at once
MERGED = 16  # pieces that are merged at once


@triton.jit(
    do_not_specialize=["query_stride", "table_stride", "splits", "piece_length", "joins", "queries"],
    do_not_specialize_on_alignment=[
        "tables", "tile_sequence", "tile_first", "query_starts", "context_lens", "table_rows", "piece_numbers",
        "piece_lengths", "piece_counts",
    ],
)  # fmt: skip
def _latent_kernel(
    query: tl.tensor,  # [t, heads, dim], rows `query_stride` apart
    keys: tl.tensor,  # [blocks, 1, block_size, dim]
    tables: tl.tensor,  # i32[rows, blocks]
    tile_sequence: tl.tensor,  # i32[n]  if PLANNED: -1: unused
    tile_first: tl.tensor,  # i32[n]  first query of the tile, relative to the sequence's first
    query_starts: tl.tensor,  # i32[s + 1]
    context_lens: tl.tensor,  # i32[s]
    table_rows: tl.tensor,  # i32[s]
    piece_numbers: tl.tensor,  # i32[n]  if PLANNED: the piece of each tile, which is one query
    piece_lengths: tl.tensor,  # i32[s]  if PLANNED
    piece_counts: tl.tensor,  # i32[t]  written, unless PLANNED: pieces of each query
    mixed_parts: tl.tensor,  # f32[n, heads, dim] if PLANNED; [t, splits, ...]; if `joins` [n * queries, ...]
    weight_parts: tl.tensor,  # f32[..., heads]  log2 of the sum of weights
    out: tl.tensor,  # [t, heads, dim]
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,  # times log2(e)
    splits: tl.tensor,  # pieces of a query at most
    piece_length: tl.tensor,  # positions; 0: each context is split into `splits` pieces
    joins: tl.tensor,  # 1: a program computes all pieces of its rows
    queries: tl.tensor,  # of a tile
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    FIRST: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    LAST_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PLANNED: tl.constexpr,
    FIXED: tl.constexpr,  # deterministic mode: `joins` may be 1
    LEAST: tl.constexpr,  # positions of a piece
) -> None:
    groups = (queries * HEADS + ROWS - 1) // ROWS
    tile = tl.num_programs(0) // groups - 1 - tl.program_id(0) // groups  # the last queries see the most positions
    if PLANNED:
        tile = tl.program_id(0) // groups  # the longest pieces come first
    owner = tl.load(tile_sequence + tile)
    if owner >= 0:
        context = tl.load(context_lens + owner)
        row = tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)
        head = row % HEADS
        if PLANNED:
            token = owner.to(tl.int64) + row // HEADS
            exists = row < HEADS
            seen = context + tl.zeros([ROWS], tl.int32)
            end = context
            piece = tl.load(piece_lengths + owner)
            number = tl.load(piece_numbers + tile)
        else:
            start = tl.load(query_starts + owner).to(tl.int64)
            num_queries = (tl.load(query_starts + owner + 1) - start).to(tl.int32)
            index = tl.load(tile_first + tile) + row // HEADS
            token = start + index
            exists = (row < queries * HEADS) & (index < num_queries)
            seen = tl.where(exists, context - num_queries + index + 1, 0)
            end = tl.max(seen, axis=0)
            piece = piece_length
            if piece_length == 0:
                piece = tl.maximum((context + splits - 1) // splits, LEAST)
                piece = (piece + TILE - 1) // TILE * TILE
            number = tl.program_id(1)
        used = (seen + piece - 1) // piece
        is_first = number == 0
        if (tl.max(exists.to(tl.int32), axis=0) > 0) & (is_first | (number * piece < end)):
            table = tables + tl.load(table_rows + owner).to(tl.int64) * table_stride
            first, last = tl.arange(0, FIRST_BLOCK), FIRST + tl.arange(0, LAST_BLOCK)
            has_first, has_last = exists[:, None] & (first < FIRST)[None, :], exists[:, None] & (last < DIM)[None, :]
            own = query + (token * query_stride + head * DIM)[:, None]
            q = in_product_type(tl.load(own + last[None, :], mask=has_last, other=0.0), keys)
            q_first = in_product_type(tl.load(own + first[None, :], mask=has_first, other=0.0), keys)
            result = out + ((token * HEADS + head) * DIM)[:, None]
            if PLANNED:
                part = tile.to(tl.int64) * HEADS + head
            else:
                part = (token * splits + number) * HEADS + head
                if FIXED and joins > 0:
                    part = (tile * queries + row // HEADS).to(tl.int64) * HEADS + head
                elif is_first:
                    tl.store(piece_counts + token, used, mask=exists & (head == 0))
            place = mixed_parts + (part * DIM)[:, None]
            stop = number + 1
            if FIXED and joins > 0:
                stop = tl.maximum((end + piece - 1) // piece, 1)
            highest = tl.full([ROWS], -float("inf"), tl.float32)  # of the pieces before, if the program joins them
            total = tl.zeros([ROWS], tl.float32)
            for current in range(number, stop):
                best, part_total, mixed, mixed_first = mix_latents(
                    q, q_first, keys, table, table, current * piece, tl.minimum((current + 1) * piece, end), seen, 0,
                    scale, first, last, ROWS, DIM, FIRST, FIRST_BLOCK, LAST_BLOCK, BLOCK_SIZE, TILE, STAGES, PRECISION,
                    False,
                )  # fmt: skip
                share = 1.0 / tl.where(part_total > 0, part_total, 1.0)
                weight = tl.where(part_total > 0, best + tl.log2(part_total), -float("inf"))
                mixed = mixed * share[:, None]
                mixed_first = mixed_first * share[:, None]
                if FIXED and (joins > 0) & (stop > 1):
                    known = (highest > -float("inf"))[:, None]  # after the first piece
                    before = tl.load(place + last[None, :], mask=has_last & known, other=0.0)
                    before_first = tl.load(place + first[None, :], mask=has_first & known, other=0.0)
                    new_highest, new_total, mixed = join_part(weight, mixed, highest, total, before)
                    _, _, mixed_first = join_part(weight, mixed_first, highest, total, before_first)
                    highest, total = new_highest, new_total
                    if current + 1 < stop:
                        tl.store(place + last[None, :], mixed, mask=has_last)
                        tl.store(place + first[None, :], mixed_first, mask=has_first)
                        tl.debug_barrier()  # other threads may read these values
                    else:
                        sum_of_shares = tl.where(total > 0, total, 1.0)[:, None]
                        mixed, mixed_first = mixed / sum_of_shares, mixed_first / sum_of_shares
                        tl.store(result + last[None, :], mixed.to(out.dtype.element_ty), mask=has_last)
                        tl.store(result + first[None, :], mixed_first.to(out.dtype.element_ty), mask=has_first)
                else:
                    whole = used <= tl.where(number == 0, 1, -1)
                    alone, is_part = whole[:, None], ((used > 1) & (current < used))[:, None]
                    tl.store(result + last[None, :], mixed.to(out.dtype.element_ty), mask=has_last & alone)
                    tl.store(result + first[None, :], mixed_first.to(out.dtype.element_ty), mask=has_first & alone)
                    tl.store(place + last[None, :], mixed, mask=has_last & is_part)
                    tl.store(place + first[None, :], mixed_first, mask=has_first & is_part)
                    tl.store(weight_parts + part, weight, mask=exists & (used > 1) & (current < used))


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["piece_counts", "first_pieces"])
def _merge_kernel(
    piece_counts: tl.tensor,  # i32[t]
    first_pieces: tl.tensor,  # i32[t]  if PLANNED
    mixed_parts: tl.tensor,
    weight_parts: tl.tensor,
    out: tl.tensor,  # [t, heads, dim]
    splits: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHUNK: tl.constexpr,  # dimensions of a program
    PLANNED: tl.constexpr,
    MERGED: tl.constexpr,  # pieces that are merged at once
) -> None:
    """Some dimensions of one head of a query."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    used = tl.load(piece_counts + token)
    if used > 1:
        begin = token * splits
        if PLANNED:
            begin = tl.load(first_pieces + token).to(tl.int64)
        highest = tl.full([1], -float("inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        mixed = tl.zeros([1, CHUNK], tl.float32)
        for start in range(0, used, MERGED):
            piece = start + tl.arange(0, MERGED)
            part = (begin + piece) * HEADS + head
            weight = tl.load(weight_parts + part, mask=piece < used, other=-float("inf"))
            real = (piece < used)[:, None] & (dim < DIM)[None, :]
            values = tl.load(mixed_parts + (part * DIM)[:, None] + dim[None, :], mask=real, other=0.0)
            if MERGED == 1:
                highest, total, mixed = join_part(weight, values, highest, total, mixed)
            else:
                new_highest = tl.maximum(highest, tl.max(weight, axis=0))
                safe = tl.where(new_highest == -float("inf"), 0.0, new_highest)
                shrink, grow = tl.exp2(highest - safe), tl.exp2(weight - safe)
                total = total * shrink + tl.sum(grow, axis=0)
                mixed = mixed * shrink[:, None] + tl.sum(values * grow[:, None], axis=0)[None, :]
                highest = new_highest
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        place = out + (token * HEADS + head) * DIM + dim[None, :]
        tl.store(place, mixed.to(out.dtype.element_ty), mask=(dim < DIM)[None, :])


def has_latents(shape: AttentionShape, storage: Storage | None) -> bool:
    """Whether these kernels compute the attention of a layer: causal over large latents, of which it sees all."""
    return (
        storage is not None
        and storage.layout.shared_values
        and shape.num_kv_heads == 1
        and shape.head_dim > LARGE_HEAD
        and shape.window is None
        and not shape.softcap
        and not shape.bidirectional
        and all(each is None for each in (shape.sinks, shape.slopes, shape.bias))
    )


def planned_attention(
    query: torch.Tensor,  # [s, heads, dim]
    shape: AttentionShape,
    storage: Storage,
    tables: torch.Tensor,  # i32[rows, blocks]
    table_rows: torch.Tensor,  # i32[s]
    lengths: torch.Tensor,  # i32[s]  0: a row of padding
    pieces: Pieces,  # split for these lengths
    out: torch.Tensor,  # [s, heads * dim]
) -> None:
    """A decode step, written to `out`."""
    tile = latent_tile(shape.num_heads, product_dtype(query.dtype, storage.keys[shape.layer].dtype))
    tiles = QueryTiles(pieces.sequence, pieces.sequence, pieces.sequence, lengths, table_rows)
    own = pieces.number, pieces.length, pieces.count
    _launch(
        query, shape, storage, tables, tiles, tile, own, (pieces.mixed, pieces.weight), out, (1, 0, 0, 1), planned=True
    )
    _merge(pieces.count, pieces.first, (pieces.mixed, pieces.weight), out, shape, 1, MERGED, planned=True)


def fixed_decode(
    query: torch.Tensor,
    shape: AttentionShape,
    storage: Storage,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    out: torch.Tensor,
) -> None:
    """A decode step in deterministic mode: each query is a tile, and its pieces are programs."""
    count = len(query)
    tile = latent_tile(MOST_ROWS, product_dtype(query.dtype, storage.keys[shape.layer].dtype))
    splits = triton.cdiv(longest, FIXED_PIECE)
    at_once = min(max(MOST_PARTS // (splits * shape.num_heads * shape.head_dim), 1), count)
    parts = _new_parts(at_once * splits if splits > 1 else 1, shape, query.device)
    counts = torch.empty(count, dtype=torch.int32, device=query.device)
    order = torch.arange(at_once + 1, dtype=torch.int32, device=query.device)
    zeros = torch.zeros(at_once, dtype=torch.int32, device=query.device)
    for start in range(0, count, at_once):
        stop = min(start + at_once, count)
        size, rows = stop - start, slice(start, stop)
        tiles = QueryTiles(order[:size], zeros[:size], order, lengths[rows], table_rows[rows])
        own = zeros, zeros, counts[rows]
        _launch(query[rows], shape, storage, tables, tiles, tile, own, parts, out[rows], (splits, FIXED_PIECE, 0, 1))
        if splits > 1:
            _merge(counts[rows], counts, parts, out[rows], shape, splits, 1)


def prompt_attention(
    query: torch.Tensor,  # [t, heads, dim]
    shape: AttentionShape,
    storage: Storage,
    tables: torch.Tensor,
    tiles: QueryTiles,  # of `QUERIES` queries
    longest: int,
    out: torch.Tensor,  # [t, heads * dim]
    *,
    num_processors: int,
    fixed: bool,
) -> None:
    """Packed queries over the cache, written to `out`."""
    count, heads = len(query), shape.num_heads
    tile = latent_tile(MOST_ROWS, product_dtype(query.dtype, storage.keys[shape.layer].dtype))
    if fixed:
        most = len(tiles.sequence)
        at_once = min(max(MOST_PARTS // (QUERIES * heads * shape.head_dim), 1), most)
        parts = _new_parts(at_once * QUERIES if longest > FIXED_PIECE else 1, shape, query.device)
        none = tiles.sequence
        for start in range(0, most, at_once):
            rows = slice(start, start + at_once)
            own = replace(tiles, sequence=tiles.sequence[rows], first=tiles.first[rows])
            _launch(
                query, shape, storage, tables, own, tile, (none, none, none), parts, out, (1, FIXED_PIECE, 1, QUERIES)
            )
        return
    splits = 2 * num_processors * tile.rows // max(count * heads, 1)
    splits = max(min(splits, triton.cdiv(longest, LEAST_PIECE)), 1)
    parts = _new_parts(count * splits if splits > 1 else 1, shape, query.device)
    counts = torch.zeros(count, dtype=torch.int32, device=query.device)
    _launch(query, shape, storage, tables, tiles, tile, (counts, counts, counts), parts, out, (splits, 0, 0, QUERIES))
    if splits > 1:
        _merge(counts, counts, parts, out, shape, splits, MERGED)


Parts = tuple[torch.Tensor, torch.Tensor]


def _new_parts(count: int, shape: AttentionShape, device: torch.device) -> Parts:
    mixed = torch.empty((count, shape.num_heads, shape.head_dim), dtype=torch.float32, device=device)
    return mixed, torch.empty((count, shape.num_heads), dtype=torch.float32, device=device)


def _launch(
    query: torch.Tensor,
    shape: AttentionShape,
    storage: Storage,
    tables: torch.Tensor,
    tiles: QueryTiles,
    tile: LatentTile,
    pieces: tuple[torch.Tensor, torch.Tensor, torch.Tensor],  # numbers, lengths, counts
    parts: Parts,
    out: torch.Tensor,
    split: tuple[int, int, int, int],  # splits, piece_length, joins, queries
    *,
    planned: bool = False,
) -> None:
    groups = triton.cdiv(split[3] * shape.num_heads, tile.rows)
    _latent_kernel[(tiles.sequence.shape[0] * groups, split[0])](
        query,
        storage.keys[shape.layer],
        tables,
        tiles.sequence,
        tiles.first,
        tiles.query_starts,
        tiles.context_lens,
        tiles.table_rows,
        *pieces,
        *parts,
        out,
        query.stride(0),
        tables.stride(0),
        score_constants(shape)[0],
        *split,
        HEADS=shape.num_heads,
        **latent_sizes(shape.head_dim),
        ROWS=tile.rows,
        BLOCK_SIZE=storage.block_size,
        TILE=tile.positions,
        STAGES=tile.stages,
        PRECISION="ieee",
        PLANNED=planned,
        FIXED=split[1] > 0,
        LEAST=LEAST_PIECE,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _merge(
    counts: torch.Tensor,
    first: torch.Tensor,
    parts: Parts,
    out: torch.Tensor,
    shape: AttentionShape,
    splits: int,
    merged: int,
    *,
    planned: bool = False,
) -> None:
    chunk = 128
    _merge_kernel[(len(out), shape.num_heads, triton.cdiv(shape.head_dim, chunk))](
        counts, first, *parts, out, splits, HEADS=shape.num_heads, DIM=shape.head_dim, CHUNK=chunk, PLANNED=planned,
        MERGED=merged, num_warps=4,
    )  # fmt: skip
