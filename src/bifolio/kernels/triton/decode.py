# mypy: disallow-untyped-decorators=False
"""Decode attention: one query per sequence over its paged context, split over the context (`split_kv`) to fill the GPU.

Each piece writes its weighted mean of values and the logarithm of its sum of weights; the last program of a head to
finish merges them, always in the same order: several at once, or in deterministic mode one after the other, as prefill
attention does.

The query heads that share a key head are the rows of one small matrix product, so keys and values are read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import AttentionShape, Storage
from bifolio.kernels.triton.merge import merge_parts, with_sinks
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.split_kv import FIXED_PIECE, PIECE_BYTES, Pieces, first_token, first_visible
from bifolio.kernels.triton.tiles import (
    LARGE_HEAD,
    TILE,
    in_product_type,
    mix_tile,
    product_dtype,
    read_tile,
    score_constants,
)

MIN_ROWS = 16  # rows of the smallest matrix product
JOINED_ROWS = 64  # rows of parts (parts times heads of a group) that are merged at once


@triton.jit(
    do_not_specialize=["window", "num_sequences", "table_stride"],
    do_not_specialize_on_alignment=[
        "tables", "table_rows", "lengths", "sequence", "number", "first", "count", "piece_length", "total_pieces",
        "shared_words",
    ],
)  # fmt: skip
def _decode_kernel(
    query: tl.tensor,  # [s, heads, dim], rows `query_stride` apart
    keys: tl.tensor,  # [blocks, kv_heads, block_size, dim]
    values: tl.tensor,
    tables: tl.tensor,  # i32[rows, max_blocks]
    table_rows: tl.tensor,  # i32[s]  row of each sequence in `tables`
    lengths: tl.tensor,  # i32[s]
    sequence: tl.tensor,
    number: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    piece_length: tl.tensor,
    total_pieces: tl.tensor,
    arrivals: tl.tensor,
    mixed_parts: tl.tensor,
    weight_parts: tl.tensor,
    shared_words: tl.tensor,  # i32[4, s]  tokens skipped, first item, number of items, index within an item's rows
    shared_mixed: tl.tensor,  # f32[items, kv_heads, SHARED_ROWS, dim]
    shared_weight: tl.tensor,
    num_sequences: tl.tensor,
    sinks: tl.tensor,  # f32[heads]
    slopes: tl.tensor,  # f32[heads]
    out: tl.tensor,  # [s, heads * dim]
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,  # of scores; 0: none
    SHARED_ROWS: tl.constexpr,  # 0: no shared prefixes
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    FIXED: tl.constexpr,  # tokens of a piece in deterministic mode, where a program computes several; 0: any length
    JOINED: tl.constexpr,  # parts that are merged at once
    GROUP_BLOCK: tl.constexpr,  # rows of the merged result
) -> None:
    kv_head = tl.program_id(0)
    if FIXED > 0:
        wait_for_inputs()
        for item in range(tl.program_id(1), tl.load(total_pieces), tl.num_programs(1)):
            _attend_piece(
                query, keys, values, tables, table_rows, lengths,
                sequence, number, first, count, piece_length, arrivals, mixed_parts, weight_parts, shared_words,
                shared_mixed, shared_weight, num_sequences, sinks, slopes,
                out, query_stride, table_stride, window, scale, kv_head, item, HEADS, KV_HEADS, GROUP, ROWS, DIM,
                DIM_BLOCK, BLOCK_SIZE, TILE, STAGES, PRECISION, CAP, SHARED_ROWS, HAS_SINKS, HAS_SLOPES, FIXED, JOINED,
                GROUP_BLOCK,
            )  # fmt: skip
    else:
        _attend_piece(
            query, keys, values, tables, table_rows, lengths,
            sequence, number, first, count, piece_length, arrivals, mixed_parts, weight_parts, shared_words,
            shared_mixed, shared_weight, num_sequences, sinks, slopes, out,
            query_stride, table_stride, window, scale, kv_head, tl.program_id(1), HEADS, KV_HEADS, GROUP, ROWS, DIM,
            DIM_BLOCK, BLOCK_SIZE, TILE, STAGES, PRECISION, CAP, SHARED_ROWS, HAS_SINKS, HAS_SLOPES, FIXED, JOINED,
            GROUP_BLOCK,
        )  # fmt: skip


@triton.jit
def _attend_piece(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    table_rows: tl.tensor,
    lengths: tl.tensor,
    sequence: tl.tensor,
    number: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    piece_length: tl.tensor,
    arrivals: tl.tensor,
    mixed_parts: tl.tensor,
    weight_parts: tl.tensor,
    shared_words: tl.tensor,
    shared_mixed: tl.tensor,
    shared_weight: tl.tensor,
    num_sequences: tl.tensor,
    sinks: tl.tensor,
    slopes: tl.tensor,
    out: tl.tensor,
    query_stride: tl.tensor,
    table_stride: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    kv_head: tl.tensor,
    item: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    FIXED: tl.constexpr,
    JOINED: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
) -> None:
    """One piece of one key head; the last piece of a sequence merges all of them."""
    owner = tl.load(sequence + item)
    length = tl.load(lengths + owner, mask=owner >= 0, other=0)
    table_row = tl.load(table_rows + owner, mask=owner >= 0, other=0)
    piece = tl.load(piece_length + owner, mask=owner >= 0, other=0)
    skip = 0
    num_shared = 0
    if SHARED_ROWS > 0:
        skip = tl.load(shared_words + owner, mask=owner >= 0, other=0)
        num_shared = tl.load(shared_words + 2 * num_sequences + owner, mask=owner >= 0, other=0)
    ALIGN: tl.constexpr = FIXED if FIXED > 0 else TILE
    begin = first_token(length, window, skip, ALIGN) + tl.load(number + item) * piece
    if FIXED == 0:
        wait_for_inputs()
    if owner >= 0:
        end = tl.minimum(begin + piece, length)
        table = tables + table_row.to(tl.int64) * table_stride
        row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
        head = kv_head * GROUP + row
        real = (row < GROUP)[:, None] & (dim < DIM)[None, :]
        source = query + owner.to(tl.int64) * query_stride
        q = in_product_type(tl.load(source + head[:, None] * DIM + dim[None, :], mask=real, other=0.0), keys)
        oldest = first_visible(length, window)
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes + head, mask=row < GROUP, other=0.0)[:, None] * 1.4426950408889634
        highest, total, mixed = _mix_tokens(
            q, keys, values, table, begin, end, oldest, length - 1, slope, kv_head, dim, scale, KV_HEADS, BLOCK_SIZE,
            ROWS, DIM, DIM_BLOCK, TILE, STAGES, PRECISION, CAP, HAS_SLOPES,
        )  # fmt: skip
        mixed = mixed / total[:, None]
        num_pieces = tl.load(count + owner)
        result = out + (owner.to(tl.int64) * HEADS + head[:, None]) * DIM + dim[None, :]
        if (num_pieces + num_shared == 1) & (not (HAS_SINKS and FIXED > 0)):  # fixed pieces are merged as in prefill
            if HAS_SINKS:
                mixed *= (total / with_sinks(sinks, head, row < GROUP, highest, total))[:, None]
            tl.store(result, mixed.to(out.dtype.element_ty), mask=real)
        else:
            part = (owner * 0 + item).to(tl.int64) * HEADS + head  # in the interpreter `item` may be a Python integer
            tl.store(mixed_parts + part[:, None] * DIM + dim[None, :], mixed, mask=real)
            tl.store(weight_parts + part, highest + tl.log2(total), mask=row < GROUP)
            tl.debug_barrier()  # all threads' results are written before the arrival is counted
            counter = arrivals + owner * KV_HEADS + kv_head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == num_pieces - 1:
                tl.store(counter, 0)
                merge_parts(
                    first, mixed_parts, weight_parts, shared_words, shared_mixed, shared_weight, num_sequences, sinks,
                    out, owner, kv_head, num_pieces, num_shared, HEADS, KV_HEADS, GROUP, DIM, DIM_BLOCK, SHARED_ROWS,
                    HAS_SINKS, JOINED, GROUP_BLOCK,
                )  # fmt: skip


@triton.jit
def _mix_tokens(
    q: tl.tensor,  # [rows, dim]
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    oldest: tl.tensor,  # first visible token
    newest: tl.tensor,  # the query's own position
    slope: tl.tensor,  # f32[rows, 1], if HAS_SLOPES
    kv_head: tl.tensor,
    dim: tl.tensor,
    scale: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
) -> tl.tensor:
    """The online softmax over the tokens from `begin` to `end`: (highest, total, mixed)."""
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    whole = begin + (end - begin) // TILE * TILE
    if oldest > begin:  # the window begins inside this piece
        whole = begin
    visible = tl.full([1, TILE], 1, tl.int1)
    for start in tl.range(begin, whole, TILE, num_stages=STAGES):
        k = read_tile(keys, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, False)
        v = read_tile(values, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, False)
        bias = 0.0
        if HAS_SLOPES:
            bias = slope * (start + tl.arange(0, TILE) - newest)[None, :]
        highest, total, mixed = mix_tile(
            q, k, v, visible, highest, total, mixed, scale, False, PRECISION, CAP, bias, HAS_SLOPES
        )
    for start in tl.range(whole, end, TILE, num_stages=1):
        token = start + tl.arange(0, TILE)
        seen = ((token < end) & (token >= oldest))[None, :]
        k = read_tile(keys, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, True)
        v = read_tile(values, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, True)
        bias = 0.0
        if HAS_SLOPES:
            bias = slope * (token - newest)[None, :]
        highest, total, mixed = mix_tile(
            q, k, v, seen, highest, total, mixed, scale, True, PRECISION, CAP, bias, HAS_SLOPES
        )
    return highest, total, mixed


def tokens_of_tile(dim: int, dtype: torch.dtype) -> int:
    """Tokens whose keys and values are read together: fewer of large heads, whose tiles must fit in shared memory."""
    most = TILE if dim <= LARGE_HEAD else TILE // 2
    return most if dtype != torch.float32 or dim <= LARGE_HEAD else most // 2


def large_head_tile(num_sequences: int, group: int) -> tuple[int, int, int]:
    """(tokens of a tile, stages, warps) with heads of `LARGE_HEAD` dimensions, as measured."""
    if num_sequences <= MIN_ROWS:
        return TILE, 2, 4
    return (TILE // 2, 4, 2) if group <= 4 else (TILE // 2, 5, 4)


def decode_attention(
    query: torch.Tensor,  # [s, heads, dim]
    shape: AttentionShape,
    storage: Storage,
    tables: torch.Tensor,  # i32[rows, max_blocks]
    table_rows: torch.Tensor,  # i32[s]
    lengths: torch.Tensor,  # i32[s]  tokens visible to the query, itself included; 0: a row of padding
    pieces: Pieces,  # split for these lengths
    *,
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,  # (words, mixed, weight) of `SharedRows`
    stages: int = 0,  # 0: choose
    warps: int = 2,
    tile: int = 0,  # tokens; 0: choose
    fixed_rows: int = 0,  # rows of a tile in deterministic mode
    num_processors: int = 1,
    overlapped: bool = False,  # the pieces were computed before the preceding kernel
    out: torch.Tensor | None = None,  # [s, heads * dim], to be written
) -> torch.Tensor:
    """[s, heads * dim]; rows of padding stay unchanged."""
    num_sequences, heads, dim = query.shape
    group = heads // shape.num_kv_heads
    keys, values = storage.keys[shape.layer], storage.values[shape.layer]
    scale, cap = score_constants(shape)
    if out is None:
        out = torch.empty((num_sequences, heads * dim), dtype=query.dtype, device=query.device)
    dtype = product_dtype(query.dtype, keys.dtype)
    if not (pieces.fixed or stages or tile) and dim == LARGE_HEAD and dtype != torch.float32:
        tile, stages, warps = large_head_tile(num_sequences, group)
    if dtype == torch.float32:
        stages = 1
    elif not stages and keys.dtype == torch.float8_e4m3fn and dim <= LARGE_HEAD // 2:
        stages = 6  # tiles of half the bytes
    elif not stages:
        stages = 5 if dim <= 64 or (overlapped and num_sequences > 96) else 4
    stages = min(stages, 2) if pieces.fixed and dim > LARGE_HEAD else stages
    tile = tile or tokens_of_tile(dim, dtype)
    rows = fixed_rows if pieces.fixed else max(MIN_ROWS, triton.next_power_of_2(group))
    group_block = rows if pieces.fixed else triton.next_power_of_2(group)
    programs = pieces.most
    if pieces.fixed:
        programs = min(programs, max(PIECE_BYTES // dim * num_processors // shape.num_kv_heads, 1))
    _decode_kernel[(shape.num_kv_heads, programs)](
        query,
        keys,
        values,
        tables,
        table_rows,
        lengths,
        pieces.sequence,
        pieces.number,
        pieces.first,
        pieces.count,
        pieces.length,
        pieces.total,
        pieces.arrivals,
        pieces.mixed,
        pieces.weight,
        *(shared or (lengths, pieces.mixed, pieces.weight)),
        num_sequences,
        query if shape.sinks is None else shape.sinks,
        query if shape.slopes is None else shape.slopes,
        out,
        query.stride(0),
        tables.stride(0),
        pieces.window,
        scale,
        HEADS=heads,
        KV_HEADS=shape.num_kv_heads,
        GROUP=group,
        ROWS=rows,
        DIM=dim,
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        BLOCK_SIZE=storage.block_size,
        TILE=tile,
        STAGES=stages,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        CAP=cap,
        SHARED_ROWS=0 if shared is None else shared[2].shape[2],
        HAS_SINKS=shape.sinks is not None,
        HAS_SLOPES=shape.slopes is not None,
        FIXED=FIXED_PIECE if pieces.fixed else 0,
        JOINED=1 if pieces.fixed else max(JOINED_ROWS // group_block, 2),
        GROUP_BLOCK=group_block,
        num_warps=warps,
        num_stages=stages,
        **(OVERLAPPED if overlapped else {}),
    )
    return out
