# mypy: disallow-untyped-decorators=False
"""Decode attention: one query per sequence over its paged context, split over the context (`split_kv`) to fill the GPU.

Each piece writes its weighted mean of values and the logarithm of its sum of weights; the last program of a head to
finish merges them, always in the order of the context.

The query heads that share a key head are the rows of one small matrix product, so keys and values are read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import AttentionShape, Storage
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.split_kv import Pieces, first_token
from bifolio.kernels.triton.tiles import TILE, mix_tile, read_tile, score_constants

MIN_ROWS = 16  # rows of the smallest matrix product


@triton.jit(
    do_not_specialize=["window", "num_sequences", "table_stride"],
    do_not_specialize_on_alignment=[
        "tables", "table_rows", "lengths", "sequence", "number", "first", "count", "piece_length", "shared_words",
    ],
)  # fmt: skip
def _decode_kernel(
    query: tl.tensor,  # [s, heads, dim], rows `query_stride` apart
    sinks: tl.tensor,  # f32[heads]
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
    arrivals: tl.tensor,
    mixed_parts: tl.tensor,
    weight_parts: tl.tensor,
    shared_words: tl.tensor,  # i32[4, s]  tokens skipped, first item, number of items, index within an item's rows
    shared_mixed: tl.tensor,  # f32[items, kv_heads, SHARED_ROWS, dim]
    shared_weight: tl.tensor,
    num_sequences: tl.tensor,
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
) -> None:
    kv_head, item = tl.program_id(0), tl.program_id(1)
    owner = tl.load(sequence + item)
    length = tl.load(lengths + owner, mask=owner >= 0, other=0)
    table_row = tl.load(table_rows + owner, mask=owner >= 0, other=0)
    piece = tl.load(piece_length + owner, mask=owner >= 0, other=0)
    skip = 0
    num_shared = 0
    if SHARED_ROWS > 0:
        skip = tl.load(shared_words + owner, mask=owner >= 0, other=0)
        num_shared = tl.load(shared_words + 2 * num_sequences + owner, mask=owner >= 0, other=0)
    begin = first_token(length, window, skip, TILE) + tl.load(number + item) * piece
    wait_for_inputs()
    if owner >= 0:
        end = tl.minimum(begin + piece, length)
        table = tables + table_row.to(tl.int64) * table_stride
        row, dim = tl.arange(0, ROWS), tl.arange(0, DIM_BLOCK)
        head = kv_head * GROUP + row
        real = (row < GROUP)[:, None] & (dim < DIM)[None, :]
        place = query + owner.to(tl.int64) * query_stride + head[:, None] * DIM + dim[None, :]
        q = tl.load(place, mask=real, other=0.0).to(keys.dtype.element_ty)
        highest = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
        oldest = tl.where(window > 0, length - window, 0)
        whole = begin + (end - begin) // TILE * TILE
        if oldest > begin:  # the window begins inside this piece's first tile
            whole = begin
        visible = tl.full([1, TILE], 1, tl.int1)
        for start in tl.range(begin, whole, TILE, num_stages=STAGES):
            k = read_tile(
                keys, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, MASKED=False
            )
            v = read_tile(
                values, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, MASKED=False
            )
            highest, total, mixed = mix_tile(
                q, k, v, visible, highest, total, mixed, scale, MASKED=False, PRECISION=PRECISION, CAP=CAP
            )
        for start in tl.range(whole, end, TILE, num_stages=1):
            token = start + tl.arange(0, TILE)
            seen = ((token < end) & (token >= oldest))[None, :]
            k = read_tile(
                keys, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, MASKED=True
            )
            v = read_tile(
                values, table, start, end, kv_head, dim, KV_HEADS, BLOCK_SIZE, DIM, DIM_BLOCK, TILE, MASKED=True
            )
            highest, total, mixed = mix_tile(
                q, k, v, seen, highest, total, mixed, scale, MASKED=True, PRECISION=PRECISION, CAP=CAP
            )
        mixed = mixed / total[:, None]
        num_pieces = tl.load(count + owner)
        result = out + (owner.to(tl.int64) * HEADS + head[:, None]) * DIM + dim[None, :]
        if num_pieces + num_shared == 1:
            if HAS_SINKS:
                mixed *= (total / _with_sinks(sinks, head, row < GROUP, highest, total))[:, None]
            tl.store(result, mixed.to(out.dtype.element_ty), mask=real)
        else:
            part = item.to(tl.int64) * HEADS + head
            tl.store(mixed_parts + part[:, None] * DIM + dim[None, :], mixed, mask=real)
            tl.store(weight_parts + part, highest + tl.log2(total), mask=row < GROUP)
            tl.debug_barrier()  # all threads' results are written before the arrival is counted
            counter = arrivals + owner * KV_HEADS + kv_head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == num_pieces - 1:
                tl.store(counter, 0)
                highest = tl.full([ROWS], -float("inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                mixed = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
                if SHARED_ROWS > 0:
                    first_item = tl.load(shared_words + num_sequences + owner)
                    member = tl.load(shared_words + 3 * num_sequences + owner)
                    first_part = (first_item.to(tl.int64) * KV_HEADS + kv_head) * SHARED_ROWS + member * GROUP + row
                    highest, total, mixed = _join(
                        shared_mixed, shared_weight, first_part, KV_HEADS * SHARED_ROWS, num_shared, dim, real,
                        highest, total, mixed, DIM, DIM_BLOCK, ROWS, GROUP,
                    )  # fmt: skip
                own_part = tl.load(first + owner).to(tl.int64) * HEADS + head
                highest, total, mixed = _join(
                    mixed_parts, weight_parts, own_part, HEADS, num_pieces, dim, real,
                    highest, total, mixed, DIM, DIM_BLOCK, ROWS, GROUP,
                )  # fmt: skip
                if HAS_SINKS:
                    total = _with_sinks(sinks, head, row < GROUP, highest, total)
                tl.store(result, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)


@triton.jit
def _with_sinks(
    sinks: tl.tensor, head: tl.tensor, exists: tl.tensor, highest: tl.tensor, total: tl.tensor
) -> tl.tensor:
    """Sums of weights 2^(score - highest), with the sink of each head; scores are multiples of log2(e)."""
    return total + tl.exp2(tl.load(sinks + head, mask=exists, other=0.0) * 1.4426950408889634 - highest)


@triton.jit
def _join(
    mixed_parts: tl.tensor,
    weight_parts: tl.tensor,
    first_part: tl.tensor,  # i64[rows]  index of each row's first part
    stride: tl.tensor,  # distance between consecutive parts of a row
    count: tl.tensor,
    dim: tl.tensor,
    real: tl.tensor,
    highest: tl.tensor,  # f32[rows]
    total: tl.tensor,  # f32[rows]
    mixed: tl.tensor,  # f32[rows, dim]
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """Merge these parts into the running softmax, weighted by their sums, in the order of the context."""
    exists = tl.arange(0, ROWS) < GROUP
    for index in range(count):
        part = first_part + index * stride
        weight = tl.load(weight_parts + part, mask=exists, other=0.0, cache_modifier=".cg")
        values = tl.load(mixed_parts + part[:, None] * DIM + dim[None, :], mask=real, other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, weight)
        shrink, grow = tl.exp2(highest - new_highest), tl.exp2(weight - new_highest)
        total = total * shrink + grow
        mixed = mixed * shrink[:, None] + values * grow[:, None]
        highest = new_highest
    return highest, total, mixed


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
    tile: int = TILE,
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
    stages = (
        1 if keys.dtype == torch.float32 else stages or (5 if dim <= 64 or (overlapped and num_sequences > 96) else 4)
    )
    _decode_kernel[(shape.num_kv_heads, pieces.most)](
        query,
        query if shape.sinks is None else shape.sinks,
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
        pieces.arrivals,
        pieces.mixed,
        pieces.weight,
        *(shared or (lengths, pieces.mixed, pieces.weight)),
        num_sequences,
        out,
        query.stride(0),
        tables.stride(0),
        pieces.window,
        scale,
        HEADS=heads,
        KV_HEADS=shape.num_kv_heads,
        GROUP=group,
        ROWS=max(MIN_ROWS, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        BLOCK_SIZE=storage.block_size,
        TILE=tile,
        STAGES=stages,
        PRECISION="ieee" if keys.dtype == torch.float32 else "tf32",
        CAP=cap,
        SHARED_ROWS=0 if shared is None else shared[2].shape[2],
        HAS_SINKS=shape.sinks is not None,
        num_warps=warps,
        num_stages=stages,
        **(OVERLAPPED if overlapped else {}),
    )
    return out
