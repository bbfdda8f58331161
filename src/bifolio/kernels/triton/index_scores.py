# mypy: disallow-untyped-decorators=False
"""Scores of an indexer for the positions of a paged context: see `choose` in `kernels/attention_interface.py`.

A program computes the scores of one query for some positions and reads their keys from the blocks of the cache. A score
depends on its query and its position alone, so that it does not change with the queries that are computed together.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import AttentionShape, Storage
from bifolio.kernels.query_split import ChoosingQueries
from bifolio.kernels.torch_choice import MOST_VALUES, pieces
from bifolio.kernels.triton.tiles import TILE, in_product_type, product_dtype, read_tile

MIN_ROWS = 16  # of a matrix product


@triton.jit(do_not_specialize=["seen", "width"])
def _index_kernel(
    query: tl.tensor,  # [n, heads, dim], rows `query_stride` apart
    weights: tl.tensor,  # [n, heads], rows `weight_stride` apart
    keys: tl.tensor,  # [blocks, 1, block_size, dim]
    table: tl.tensor,  # i32[...]  of the sequence
    ranked: tl.tensor,  # f32[n, width]
    query_stride: tl.tensor,
    weight_stride: tl.tensor,
    seen: tl.tensor,  # positions that the first query sees; the next ones see one more each
    width: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    start = tl.program_id(1) * TILE
    end = seen + row
    token = start + tl.arange(0, TILE)
    target = ranked + row.to(tl.int64) * width + token
    if start < end:
        head, dim = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
        real = (head < HEADS)[:, None] & (dim < DIM)[None, :]
        source = query + row.to(tl.int64) * query_stride
        q = in_product_type(tl.load(source + head[:, None] * DIM + dim[None, :], mask=real, other=0.0), keys)
        k = read_tile(keys, table, start, end, 0, dim, 1, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, True)
        if k.dtype == tl.float8e4nv:
            k = k.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        weight = tl.load(weights + row.to(tl.int64) * weight_stride + head, mask=head < HEADS, other=0.0)
        scores = tl.where(scores < 0.0, 0.0, scores) * weight.to(tl.float32)[:, None]  # NaN stays
        total = tl.sum(tl.where((head < HEADS)[:, None], scores, 0.0), axis=0)
        total = tl.where((token < end) & (total == total), total, -float("inf"))
        tl.store(target, total, mask=token < width)
    else:
        tl.store(target, tl.full([TILE], -float("inf"), tl.float32), mask=token < width)


def index_scores(
    query: torch.Tensor,  # [n, heads, dim]  neighbouring queries of a sequence
    weights: torch.Tensor,  # [n, heads]
    shape: AttentionShape,
    storage: Storage,
    table: torch.Tensor,  # i32[blocks]  of the sequence
    seen: int,  # positions that the first query sees
) -> torch.Tensor:
    """f32[n, positions that the last query sees]: -inf where a query does not see a position, and in place of NaN."""
    count, heads, dim = query.shape
    keys, width = storage.keys[shape.layer], seen + count - 1
    ranked = torch.empty((count, width), dtype=torch.float32, device=query.device)
    dtype = product_dtype(query.dtype, keys.dtype)
    tile = TILE // 2 if dtype == torch.float32 else TILE
    _index_kernel[(count, triton.cdiv(width, tile))](
        query,
        weights,
        keys,
        table,
        ranked,
        query.stride(0),
        weights.stride(0),
        seen,
        width,
        shape.scale,
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


def paged_scores(
    part: ChoosingQueries, query: torch.Tensor, weights: torch.Tensor, shape: AttentionShape, storage: Storage
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows of the batch, and their scores, as many at once as memory allows."""
    table = torch.as_tensor(part.table, dtype=torch.int32, device=query.device)
    for rows, seen in pieces(part, max(MOST_VALUES // (part.seen + part.stop - part.start), 1)):
        yield rows, index_scores(query[rows], weights[rows], shape, storage, table, seen[0])
