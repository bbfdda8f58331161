# mypy: disallow-untyped-decorators=False
"""Prefill attention: packed sequences of any lengths, over fresh keys and values or over the paged context.

It is causal, or bidirectional over whole texts.

Each program computes one tile (`query_tiles`) of one head's queries over their visible keys, first the whole tiles that
need no mask, then those on the diagonal. In deterministic mode it does so for each piece of `FIXED_PIECE` tokens, and
merges the pieces as decode attention does: a token gets the same bits in both phases. Several sequences of equal length
without a prefix use torch's attention (cuDNN), which is faster, and so do long sequences (`long_attention`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel

from bifolio.kernels.interface import AttentionSegment, AttentionShape, Heads, Storage
from bifolio.kernels.triton.query_tiles import QueryTiles
from bifolio.kernels.triton.split_kv import FIXED_PIECE
from bifolio.kernels.triton.tiles import (
    in_product_type,
    join_part,
    mix_tile,
    prefill_tile,
    product_dtype,
    read_tile,
    score_constants,
)

CUDNN_FROM = 1024  # tokens of each sequence; building cuDNN's plan does not pay off for shorter ones
HUGE_HEAD = 512  # dimensions; tiles of larger heads have fewer rows, so that they fit in shared memory
CUDNN_STEP = 1024  # lengths are padded to multiples of this, so that few plans are built


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=[
        "tables", "tile_sequence", "tile_first", "query_starts", "context_lens", "table_rows",
    ],
)  # fmt: skip
def _prefill_kernel(
    query: tl.tensor,  # [t, heads, dim]
    keys: tl.tensor,  # fresh: [t, kv_heads, dim]; else the cache [blocks, kv_heads, block_size, dim]
    values: tl.tensor,
    tables: tl.tensor,  # i32[rows, max_blocks]
    tile_sequence: tl.tensor,
    tile_first: tl.tensor,
    query_starts: tl.tensor,
    context_lens: tl.tensor,
    table_rows: tl.tensor,
    sinks: tl.tensor,  # f32[heads]
    biases: tl.tensor,  # f32[heads]: slopes; or f32[heads, COLUMNS]: `AttentionShape.bias`
    out: tl.tensor,  # [t, heads * dim]
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # `AttentionShape.reach`
    FRESH: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,  # of scores; 0: none
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    FIXED: tl.constexpr,  # tokens of a piece in deterministic mode; 0: one piece
    BIDIRECTIONAL: tl.constexpr = False,
    COLUMNS: tl.constexpr = 0,  # of a bias by distance; 0: none
) -> None:
    tile, head = tl.program_id(1), tl.program_id(0)
    kv_head = head // (HEADS // KV_HEADS)
    owner = tl.load(tile_sequence + tile)
    first = tl.load(tile_first + tile)
    start_query = tl.load(query_starts + owner).to(tl.int64)
    num_queries = (tl.load(query_starts + owner + 1) - start_query).to(tl.int32)
    context = tl.load(context_lens + owner)
    table = tables + tl.load(table_rows + owner).to(tl.int64) * table_stride
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
    index = first + row
    real = (index < num_queries)[:, None] & (dim < DIM)[None, :]
    token = start_query + index
    q = tl.load(query + token[:, None] * query_stride + head * DIM + dim[None, :], mask=real, other=0.0)
    q = in_product_type(q, keys)
    position = context - num_queries + index  # of each query in its sequence
    lowest = context - num_queries + first  # position of the tile's first query
    end = tl.minimum(lowest + ROWS, context)  # keys from here on are masked for the whole tile
    ALIGN: tl.constexpr = FIXED if FIXED > 0 else TILE
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0) // ALIGN * ALIGN
    if WINDOW < 0:
        begin = lowest // -WINDOW * -WINDOW // ALIGN * ALIGN
    whole = (lowest + 1) // TILE * TILE
    if BIDIRECTIONAL:
        end = context
        whole = context // TILE * TILE
        if WINDOW > 0:
            end = tl.minimum(lowest + ROWS + WINDOW, context)
    if WINDOW > 0:
        whole = begin
    if WINDOW < 0:
        if -WINDOW % ALIGN != 0:  # a chunk may begin inside a tile
            whole = begin
        whole = tl.where((end - 1) // -WINDOW > lowest // -WINDOW, begin, whole)  # or inside these queries
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(biases + head) * 1.4426950408889634
    own_biases = biases + head * COLUMNS
    if FIXED > 0:
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
        for piece in range(begin, end, FIXED):
            last = tl.minimum(piece + FIXED, end)
            weight, part_total, values_mixed = _mix_tokens(
                q, keys, values, table, piece, tl.minimum(tl.maximum(whole, piece), last), last, end, start_query,
                position, slope, own_biases, kv_head, dim, key_stride, value_stride, scale, KV_HEADS, BLOCK_SIZE, ROWS,
                DIM, DIM_BLOCK, TILE, WINDOW, FRESH, PRECISION, CAP, BIDIRECTIONAL, HAS_SLOPES, COLUMNS,
            )  # fmt: skip
            weight = tl.where(part_total > 0, weight + tl.log2(part_total), -float("inf"))
            values_mixed = values_mixed / tl.where(part_total > 0, part_total, 1.0)[:, None]
            highest, total, mixed = join_part(weight, values_mixed, highest, total, mixed)
    else:
        highest, total, mixed = _mix_tokens(
            q, keys, values, table, begin, whole, end, end, start_query, position, slope, own_biases, kv_head, dim,
            key_stride, value_stride, scale, KV_HEADS, BLOCK_SIZE, ROWS, DIM, DIM_BLOCK, TILE, WINDOW, FRESH,
            PRECISION, CAP, BIDIRECTIONAL, HAS_SLOPES, COLUMNS,
        )  # fmt: skip
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head) * 1.4426950408889634 - tl.where(total > 0, highest, 0.0))
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]  # a row of padding has no keys
    place = out + (token[:, None] * HEADS + head) * DIM + dim[None, :]
    tl.store(place, mixed.to(out.dtype.element_ty), mask=real)


@triton.jit
def _mix_tokens(
    q: tl.tensor,  # [rows, dim]
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    whole: tl.tensor,  # from here on tiles are masked
    last: tl.tensor,
    end: tl.tensor,  # tokens from here on are not read
    start_query: tl.tensor,  # first fresh token of the sequence
    position: tl.tensor,  # i32[rows]
    slope: tl.tensor,  # of the head, if HAS_SLOPES
    biases: tl.tensor,  # f32[COLUMNS] of the head
    kv_head: tl.tensor,
    dim: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    FRESH: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    BIDIRECTIONAL: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """The online softmax over the tokens from `begin` to `last`: (highest, total, mixed)."""
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    all_visible = tl.full([1, TILE], 1, tl.int1)
    for start in tl.range(begin, whole, TILE):
        if FRESH:
            k = _read_fresh(
                keys, start_query + start, end - start, kv_head, dim, key_stride, DIM, DIM_BLOCK, TILE, False
            )
            v = _read_fresh(
                values, start_query + start, end - start, kv_head, dim, value_stride, DIM, DIM_BLOCK, TILE, False
            )
        else:
            k = read_tile(keys, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, False)
            v = read_tile(values, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, False)
        bias = _bias(slope, biases, position, start + tl.arange(0, TILE), HAS_SLOPES, COLUMNS)
        highest, total, mixed = mix_tile(
            q, k, v, all_visible, highest, total, mixed, scale, False, PRECISION, CAP, bias, HAS_SLOPES or COLUMNS > 0
        )
    for start in tl.range(whole, last, TILE):
        other = start + tl.arange(0, TILE)
        visible = position[:, None] >= other[None, :]
        if BIDIRECTIONAL:
            visible = (position[:, None] >= 0) & (other[None, :] < end)
            if WINDOW > 0:
                visible = visible & (other[None, :] - position[:, None] < WINDOW)
        if WINDOW > 0:
            visible = visible & (position[:, None] - other[None, :] < WINDOW)
        if WINDOW < 0:
            visible = visible & (other[None, :] >= (position // -WINDOW * -WINDOW)[:, None])
        if FRESH:
            k = _read_fresh(
                keys, start_query + start, end - start, kv_head, dim, key_stride, DIM, DIM_BLOCK, TILE, True
            )
            v = _read_fresh(
                values, start_query + start, end - start, kv_head, dim, value_stride, DIM, DIM_BLOCK, TILE, True
            )
        else:
            k = read_tile(keys, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, True)
            v = read_tile(values, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, True)
        bias = _bias(slope, biases, position, other, HAS_SLOPES, COLUMNS)
        highest, total, mixed = mix_tile(
            q, k, v, visible, highest, total, mixed, scale, True, PRECISION, CAP, bias, HAS_SLOPES or COLUMNS > 0
        )
    return highest, total, mixed


@triton.jit
def _bias(
    slope: tl.tensor,
    biases: tl.tensor,  # f32[COLUMNS]
    position: tl.tensor,  # i32[rows]
    other: tl.tensor,  # i32[tile]
    HAS_SLOPES: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tl.tensor:
    """f32[rows, tile]: added to scores, times log2(e); 0 without a bias."""
    bias = 0.0
    if HAS_SLOPES:
        bias = slope * (other[None, :] - position[:, None])
    if COLUMNS > 0:
        column = tl.maximum(other[None, :] - position[:, None] + COLUMNS // 2, 0)
        bias = tl.load(biases + tl.minimum(column, COLUMNS - 1)) * 1.4426950408889634
    return bias


@triton.jit
def _read_fresh(
    source: tl.tensor,
    token: tl.tensor,  # first row to read
    left: tl.tensor,  # rows that may be read
    kv_head: tl.tensor,
    dim: tl.tensor,
    stride: tl.tensor,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    offset = tl.arange(0, TILE)
    place = source + (token + offset[:, None]) * stride + kv_head * DIM + dim[None, :]
    if MASKED:
        return tl.load(place, mask=(offset < left)[:, None] & (dim < DIM)[None, :], other=0.0)
    if DIM != DIM_BLOCK:
        return tl.load(place, mask=(dim < DIM)[None, :] & (offset >= 0)[:, None], other=0.0)
    return tl.load(place)


def tile_rows(dtype: torch.dtype, shape: AttentionShape, max_query_len: int) -> int:
    """Queries per program."""
    most = 32 if dtype == torch.float32 else 128 if shape.head_dim <= 128 else 64
    if shape.head_dim > HUGE_HEAD:
        most = 16 if dtype == torch.float32 else 32
    if max_query_len <= 16:
        return 16
    return 64 if max_query_len <= 64 < most else most  # few sizes: each is compiled separately


def fixed_rows(dtype: torch.dtype, shape: AttentionShape, max_query_len: int) -> int:
    """Queries per program in deterministic mode: sizes that give a row the same order of summation.

    With 16-bit numbers a warp holds 16 whole rows, for each of these sizes; with f32 there is one size.
    """
    if dtype == torch.float32:
        return 16
    if shape.head_dim > HUGE_HEAD:
        return 32
    return 64 if max_query_len <= 64 or shape.head_dim > 128 else 128


def prefill_attention(
    heads: Heads,  # of the segment's tokens only; keys and values may be None when read from the cache
    shape: AttentionShape,
    segment: AttentionSegment,
    storage: Storage | None,
    tiles: QueryTiles,
    rows: int,
    out: torch.Tensor,  # [t, heads * dim]
    fixed: bool = False,  # deterministic mode
) -> None:
    """Attention of a packed segment, written to `out`."""
    query = heads.query
    tables: Any
    fresh = segment.fresh or storage is None or segment.block_tables is None
    if fresh:
        keys, values, tables, block_size = heads.key, heads.value, tiles.sequence, 1
    else:
        assert storage is not None
        keys, values, block_size = storage.keys[shape.layer], storage.values[shape.layer], storage.block_size
        tables = segment.block_tables
    dtype = product_dtype(query.dtype, keys.dtype)
    wide = dtype == torch.float32
    scale, cap = score_constants(shape)
    _prefill_kernel[(shape.num_heads, tiles.sequence.shape[0])](
        query,
        keys,
        values,
        tables,
        tiles.sequence,
        tiles.first,
        tiles.query_starts,
        tiles.context_lens,
        tiles.table_rows,
        query if shape.sinks is None else shape.sinks,
        next((biases for biases in (shape.slopes, shape.bias) if biases is not None), query),
        out,
        query.stride(0),
        keys.stride(0) if fresh else 0,
        values.stride(0) if fresh else 0,
        0 if fresh else tables.stride(0),
        scale,
        HEADS=shape.num_heads,
        KV_HEADS=shape.num_kv_heads,
        DIM=shape.head_dim,
        DIM_BLOCK=max(16, triton.next_power_of_2(shape.head_dim)),
        BLOCK_SIZE=block_size,
        ROWS=rows,
        TILE=prefill_tile(shape.head_dim, dtype),
        WINDOW=shape.reach,
        FRESH=fresh,
        PRECISION="ieee" if wide else "tf32",
        CAP=cap,
        HAS_SINKS=shape.sinks is not None,
        HAS_SLOPES=shape.slopes is not None,
        FIXED=FIXED_PIECE if fixed else 0,
        BIDIRECTIONAL=shape.bidirectional,
        COLUMNS=0 if shape.bias is None else shape.bias.shape[1],
        num_warps=8 if rows >= 128 else 4,
        num_stages=1 if wide else 3 if shape.head_dim <= 128 else 2,
    )


def uses_cudnn(query: torch.Tensor, shape: AttentionShape, segment: AttentionSegment, storage: Storage | None) -> bool:
    """Whether one call of cuDNN is faster: for several sequences of equal length without a prefix.

    One sequence in a cache has plans of fixed lengths (`long_attention`).
    """
    equal = segment.num_sequences * segment.max_query_len == segment.token_end - segment.token_start
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and segment.fresh
        and (storage is None or segment.num_sequences > 1)
        and equal
        and segment.max_query_len >= CUDNN_FROM
        and (shape.window is None or shape.window >= segment.max_query_len)
        and shape.head_dim <= 128
        and not shape.softcap
        and not shape.bidirectional
        and shape.sinks is None
        and shape.slopes is None
        and shape.head_dim % 8 == 0
    )


def cudnn_attention(heads: Heads, shape: AttentionShape, num_sequences: int) -> torch.Tensor:
    """Causal attention of equally long sequences over their own fresh keys and values: [t, heads * dim]."""
    query, key, value = (h.unflatten(0, (num_sequences, -1)).transpose(1, 2) for h in heads)  # [s, heads, n, dim]
    length = query.shape[2]
    padding = -length % CUDNN_STEP
    if padding:  # after the causal diagonal: masked for all real queries
        query, key, value = (F.pad(h, (0, 0, 0, padding)) for h in (query, key, value))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=shape.scale, enable_gqa=shape.num_heads != shape.num_kv_heads
        )
    mixed = mixed[:, :, :length] if padding else mixed
    return mixed.transpose(1, 2).reshape(num_sequences * length, -1)
