# mypy: disallow-untyped-decorators=False
"""Scores of an indexer for the positions of paged contexts: see `choose` in `kernels/attention_interface.py`.

A program computes the scores of one query for some positions and reads their keys from the blocks of the cache. A score
depends on its query and its position alone, so that it does not change with the queries that are computed together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import AttentionShape, Storage
from bifolio.kernels.triton.pass_rows import PassRows
from bifolio.kernels.triton.tiles import TILE, in_product_type, product_dtype, read_tile

MIN_ROWS = 16  # of a matrix product
PROGRAMS = 8  # of a multiprocessor


@triton.jit(
    do_not_specialize=["width", "weight_stride", "table_stride"],
    do_not_specialize_on_alignment=["tables", "table_rows", "seen"],
)
def _index_kernel(
    query: tl.tensor,  # [n, heads, dim], rows `query_stride` apart
    weights: tl.tensor,  # [n, heads], rows `weight_stride` apart
    keys: tl.tensor,  # [blocks, 1, block_size, dim]
    tables: tl.tensor,  # i32[rows, blocks]
    table_rows: tl.tensor,  # i32[n]
    seen: tl.tensor,  # i32[n]  positions that the query sees
    ranked: tl.tensor,  # f32[n, width]
    query_stride: tl.tensor,
    weight_stride: tl.tensor,
    table_stride: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    LEAST: tl.constexpr,  # queries that see no more positions have no scores
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(seen + row)
    if end > LEAST:
        table = tables + tl.load(table_rows + row).to(tl.int64) * table_stride
        head, dim = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
        real = (head < HEADS)[:, None] & (dim < DIM)[None, :]
        source = query + row * query_stride
        q = in_product_type(tl.load(source + head[:, None] * DIM + dim[None, :], mask=real, other=0.0), keys)
        weight = tl.load(weights + row * weight_stride + head, mask=head < HEADS, other=0.0).to(tl.float32)
        for start in range(tl.program_id(1) * TILE, end, tl.num_programs(1) * TILE):
            token = start + tl.arange(0, TILE)
            k = read_tile(keys, table, start, end, 0, dim, 1, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, True)
            if k.dtype == tl.float8e4nv:
                k = k.to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            scores = tl.where(scores < 0.0, 0.0, scores) * weight[:, None]  # NaN stays
            total = tl.sum(tl.where((head < HEADS)[:, None], scores, 0.0), axis=0)
            total = tl.where(total == total, total, -float("inf"))
            tl.store(ranked + row * width + token, total, mask=token < end)


def index_scores(
    query: torch.Tensor,  # [t, heads, dim]
    weights: torch.Tensor,  # [t, heads]
    shape: AttentionShape,
    storage: Storage,
    rows: PassRows,
    part: tuple[int, int, int],  # first query, the one after the last, most positions that one sees
    *,
    num_processors: int,
) -> torch.Tensor:
    """f32[n, width]: -inf in place of NaN; undefined where a query does not see a position, or sees `top_k` or less."""
    first, stop, width = part
    heads, dim = query.shape[1:]
    keys, count = storage.keys[shape.layer], stop - first
    ranked = torch.empty((count, width), dtype=torch.float32, device=query.device)
    dtype = product_dtype(query.dtype, keys.dtype)
    tile = TILE // 2 if dtype == torch.float32 else TILE
    programs = min(triton.cdiv(width, tile), max(PROGRAMS * num_processors // count, 1))
    _index_kernel[(count, programs)](
        query[first:stop],
        weights[first:stop],
        keys,
        rows.tables,
        rows.table_rows[first:stop],
        rows.seen[first:stop],
        ranked,
        query.stride(0),
        weights.stride(0),
        rows.tables.stride(0),
        width,
        shape.scale,
        LEAST=shape.top_k,
        HEADS=heads,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(heads)),
        DIM=dim,
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        BLOCK_SIZE=storage.block_size,
        TILE=tile,
        PRECISION="ieee",
        num_warps=4,
    )
    return ranked
