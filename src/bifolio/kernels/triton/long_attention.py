# mypy: disallow-untyped-decorators=False
"""Attention of long prompt chunks over long contexts: cuDNN over parts of the context, merged by their log-sum-exp.

    positions   0                    16384        24576  25600      28672          32768
    keys        |<----- 16384 ------>|<-- 8192 -->|<1024>|<- ... ->|
    queries     every part is read by all queries of a piece         |<--- 4096 --->|  causal, over its own keys

cuDNN builds an execution plan for each pair of lengths, which takes about 60 ms, so all lengths are multiples of `STEP`
from two short lists. Pieces of queries begin and end at multiples of `STEP`; queries before or after the chunk are
padding. Keys and values are gathered from their blocks once for each layer, token after token, so that the strides of a
part do not depend on the context: they belong to the plan, as do those of the queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import AttentionSegment, AttentionShape, Storage
from bifolio.kernels.triton.cache import num_turned_heads
from bifolio.kernels.triton.tiles import join_part, product_dtype

STEP = 1024  # tokens
QUERY_LENGTHS = (8192, 4096, 1024)  # of a piece
KEY_LENGTHS = (32768, 16384, 8192, 4096, 2048, 1024)  # of a part
# H200, 16 heads of 128, bf16: cuDNN multiplies at 564 (causal) to 688 TFLOP/s, the packed kernel at about half of it.
MOST_PADDING = 1.5  # computed pairs of query and key, at most, for each pair that is needed
FEWEST_PAIRS = 1 << 21  # of a sequence: below, the launches of several parts take longer than one kernel
MOST_PARTS = 8  # of one launch of the merge


class LongQueries(NamedTuple):
    """The queries of a sequence whose attention runs in parts."""

    sequence: int  # of the segment
    token: int  # first query, relative to the segment
    num_queries: int
    context: int  # tokens visible to the last query, itself included

    @property
    def start(self) -> int:
        """Position of the first query, rounded down."""
        return (self.context - self.num_queries) // STEP * STEP

    @property
    def end(self) -> int:
        """Position after the last query, rounded up."""
        return -(-self.context // STEP) * STEP

    @property
    def is_worth(self) -> bool:
        """Whether parts with padding take less time than one kernel without."""
        needed = self.num_queries * (2 * self.context - self.num_queries) // 2
        computed = (self.end - self.start) * (self.end + self.start) // 2
        return needed >= FEWEST_PAIRS and computed <= MOST_PADDING * needed


class Part(NamedTuple):
    """The output of some keys for a piece of queries."""

    values: torch.Tensor  # [1, heads, queries, dim]
    weight: torch.Tensor  # f32[1, heads, queries, 1]  log-sum-exp of the scores


def can_be_long(query: torch.Tensor, shape: AttentionShape, storage: Storage) -> bool:
    """Whether cuDNN computes this layer's attention as it is."""
    keys = storage.keys[shape.layer]
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and product_dtype(query.dtype, keys.dtype) == query.dtype
        and shape.head_dim <= 256
        and shape.head_dim % 8 == 0
        and not shape.softcap
        and shape.sinks is None
        and shape.slopes is None
    )


def long_queries(segment: AttentionSegment, window: int | None) -> list[LongQueries]:
    """The sequences of a segment that are worth several parts; `window`: none of them may exceed it."""
    starts, contexts = np.asarray(segment.query_starts), np.asarray(segment.context_lens)
    every = (
        LongQueries(number, int(starts[number]), int(starts[number + 1] - starts[number]), int(contexts[number]))
        for number in range(len(contexts))
    )
    return [item for item in every if item.is_worth and (window is None or item.context <= window)]


def long_attention(
    query: torch.Tensor,  # [t, heads, dim]  of the segment
    shape: AttentionShape,
    storage: Storage,
    table: torch.Tensor,  # i32[blocks]  of the sequence
    item: LongQueries,
    out: torch.Tensor,  # [t, heads * dim]
) -> None:
    """Attention of one sequence's queries, written to their rows of `out`."""
    keys, values = gather_context(shape, storage, table, item, query.dtype)
    own = query[item.token : item.token + item.num_queries]
    before, rows = item.context - item.num_queries - item.start, item.end - item.start
    if rows > item.num_queries:
        own = new_queries(rows, shape, query)
        own[before : before + item.num_queries] = query[item.token : item.token + item.num_queries]
    first = item.start
    for length in lengths_of(item.end - item.start, QUERY_LENGTHS):
        piece = own[first - item.start : first - item.start + length]
        parts = [
            attend_part(piece, keys[begin:end], values[begin:end], shape.scale, is_causal=begin == first)
            for begin, end in parts_of(first, length)
        ]
        begin, end = max(first, item.context - item.num_queries), min(first + length, item.context)
        row = item.token + begin - (item.context - item.num_queries)
        merge_parts(parts, begin - first, out[row : row + end - begin])
        first += length


def new_queries(count: int, shape: AttentionShape, like: torch.Tensor) -> torch.Tensor:
    """Zeros [count, heads, dim], with the strides of the queries of a pass."""
    return like.new_zeros((count, num_turned_heads(shape), shape.head_dim))[:, : shape.num_heads]


def lengths_of(total: int, lengths: tuple[int, ...]) -> Iterator[int]:
    """The longest lengths first that sum up to `total`, a multiple of the shortest."""
    for length in lengths:
        while total >= length:
            yield length
            total -= length


def parts_of(first: int, length: int) -> Iterator[tuple[int, int]]:
    """(begin, end) of the keys of each part, for queries at `first`; the last part is causal."""
    begin = 0
    for size in lengths_of(first, KEY_LENGTHS):
        yield begin, begin + size
        begin += size
    yield first, first + length


def attend_part(
    query: torch.Tensor,  # [n, heads, dim]
    keys: torch.Tensor,  # [m, kv_heads, dim]
    values: torch.Tensor,
    scale: float,
    *,
    is_causal: bool,
) -> Part:
    """Attention over some keys; a causal mask begins at the first query and the first key."""
    query, keys, values = (x.unsqueeze(0).transpose(1, 2) for x in (query, keys, values))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, keys, values, None, True, 0.0, is_causal, False, scale=scale
    )
    return Part(found[0], found[1])


def warm_up_long(shape: AttentionShape, dtype: torch.dtype, device: str, max_context: int, max_queries: int) -> None:
    """Build cuDNN's plans for chunks of up to `max_queries` tokens in contexts of up to `max_context`."""
    rows = -(-max_context // STEP) * STEP
    keys = torch.zeros((max(KEY_LENGTHS), shape.num_kv_heads, shape.head_dim), dtype=dtype, device=device)
    for count in QUERY_LENGTHS:
        if count > min(-(-max_queries // STEP) * STEP, rows):
            continue
        query = new_queries(count, shape, keys)
        parts = [attend_part(query, keys[:count], keys[:count], shape.scale, is_causal=True)]
        parts += [
            attend_part(query, keys[:length], keys[:length], shape.scale, is_causal=False)
            for length in KEY_LENGTHS
            if count + length <= rows
        ]
        merge_parts(parts, 0, query.new_empty((count, shape.num_heads * shape.head_dim)))


# -- keys and values in one array -----------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["context", "num_tokens"])
def _gather_kernel(
    keys: tl.tensor,  # [blocks, kv_heads, BLOCK_SIZE, DIM]
    values: tl.tensor,
    table: tl.tensor,  # i32[blocks of the sequence]
    out: tl.tensor,  # [2, num_tokens, kv_heads, DIM]
    context: tl.tensor,  # tokens that exist; zeros follow
    num_tokens: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, dim = tl.program_id(1), tl.arange(0, DIM_BLOCK)
    exists = token < context
    block = tl.load(table + token // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
    row = (block * KV_HEADS + head) * BLOCK_SIZE + token % BLOCK_SIZE
    place = row[:, None] * DIM + dim[None, :]
    mask = exists[:, None] & (dim < DIM)[None, :]
    target = (token.to(tl.int64) * KV_HEADS + head)[:, None] * DIM + dim[None, :]
    stored = (token < num_tokens)[:, None] & (dim < DIM)[None, :]
    size = KV_HEADS * num_tokens.to(tl.int64) * DIM
    key, value = tl.load(keys + place, mask=mask, other=0.0), tl.load(values + place, mask=mask, other=0.0)
    tl.store(out + target, key.to(out.dtype.element_ty), mask=stored)
    tl.store(out + size + target, value.to(out.dtype.element_ty), mask=stored)


def gather_context(
    shape: AttentionShape, storage: Storage, table: torch.Tensor, item: LongQueries, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the context: [item.end, kv_heads, dim] each; zeros after the last token."""
    keys, tokens = storage.keys[shape.layer], 64
    out = keys.new_empty((2, item.end, shape.num_kv_heads, shape.head_dim), dtype=dtype)
    _gather_kernel[(triton.cdiv(item.end, tokens), shape.num_kv_heads)](
        keys, storage.values[shape.layer], table, out, item.context, item.end, KV_HEADS=shape.num_kv_heads,
        BLOCK_SIZE=storage.block_size, DIM=shape.head_dim, DIM_BLOCK=triton.next_power_of_2(shape.head_dim),
        TOKENS=tokens, num_warps=4,
    )  # fmt: skip
    return out[0], out[1]


# -- the merge ------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["num_parts", "first", "num_rows", "piece"])
def _merge_kernel(
    values0: tl.tensor,  # [piece, HEADS, DIM]
    values1: tl.tensor,
    values2: tl.tensor,
    values3: tl.tensor,
    values4: tl.tensor,
    values5: tl.tensor,
    values6: tl.tensor,
    values7: tl.tensor,
    weight0: tl.tensor,  # f32[HEADS, piece]
    weight1: tl.tensor,
    weight2: tl.tensor,
    weight3: tl.tensor,
    weight4: tl.tensor,
    weight5: tl.tensor,
    weight6: tl.tensor,
    weight7: tl.tensor,
    out: tl.tensor,  # [num_rows, HEADS * DIM]
    total_weight: tl.tensor,  # f32[HEADS, piece], if HAS_WEIGHT
    num_parts: tl.tensor,
    first: tl.tensor,  # row of the piece
    num_rows: tl.tensor,
    piece: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
) -> None:
    index, head, dim = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1), tl.arange(0, DIM_BLOCK)
    exists = index < num_rows
    row = (first + index).to(tl.int64)
    place = (row[:, None] * HEADS + head) * DIM + dim[None, :]
    mask = exists[:, None] & (dim < DIM)[None, :]
    at = head * piece + row
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    highest, total, mixed = _join(values0, weight0, place, at, mask, exists, highest, total, mixed)
    highest, total, mixed = _join(values1, weight1, place, at, mask, exists, highest, total, mixed)
    if num_parts > 2:
        highest, total, mixed = _join(values2, weight2, place, at, mask, exists, highest, total, mixed)
    if num_parts > 3:
        highest, total, mixed = _join(values3, weight3, place, at, mask, exists, highest, total, mixed)
    if num_parts > 4:
        highest, total, mixed = _join(values4, weight4, place, at, mask, exists, highest, total, mixed)
    if num_parts > 5:
        highest, total, mixed = _join(values5, weight5, place, at, mask, exists, highest, total, mixed)
    if num_parts > 6:
        highest, total, mixed = _join(values6, weight6, place, at, mask, exists, highest, total, mixed)
    if num_parts > 7:
        highest, total, mixed = _join(values7, weight7, place, at, mask, exists, highest, total, mixed)
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    target = (index.to(tl.int64)[:, None] * HEADS + head) * DIM + dim[None, :]
    tl.store(out + target, mixed.to(out.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        tl.store(total_weight + at, (highest + tl.log2(tl.where(exists, total, 1.0))) * 0.6931471805599453, mask=exists)


@triton.jit
def _join(
    values: tl.tensor,
    weights: tl.tensor,
    place: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    exists: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
) -> tl.tensor:
    weight = tl.load(weights + at, mask=exists, other=-float("inf")) * 1.4426950408889634
    value = tl.load(values + place, mask=mask, other=0.0).to(tl.float32)
    return join_part(weight, value, highest, total, mixed)


def merge_parts(parts: list[Part], first: int, out: torch.Tensor) -> None:
    """Write the attention over all parts for the rows of a piece from `first` on: `out` is [rows, heads * dim]."""
    while len(parts) > MOST_PARTS:  # their mean in f32 is one part
        parts = [_merged(parts[:MOST_PARTS]), *parts[MOST_PARTS:]]
    if len(parts) == 1:
        out.copy_(parts[0].values[0].transpose(0, 1)[first : first + len(out)].flatten(1))
        return
    _merge(parts, first, out, None)


def _merged(parts: list[Part]) -> Part:
    _, heads, count, dim = parts[0].values.shape
    values, weight = parts[0].values.new_empty((count, heads * dim), dtype=torch.float32), parts[0].weight
    total = torch.empty_like(weight, memory_format=torch.contiguous_format)
    _merge(parts, 0, values, total)
    return Part(values.view(count, heads, dim).transpose(0, 1).unsqueeze(0), total)


def _merge(parts: list[Part], first: int, out: torch.Tensor, weight: torch.Tensor | None) -> None:
    _, heads, count, dim = parts[0].values.shape
    every = parts + [parts[0]] * (MOST_PARTS - len(parts))
    values: list[Any] = [part.values.transpose(1, 2).contiguous() for part in every]
    weights: list[Any] = [part.weight.contiguous() for part in every]
    rows = max(1, 4096 // triton.next_power_of_2(dim))
    _merge_kernel[(triton.cdiv(len(out), rows), heads)](
        *values, *weights, out, weights[0] if weight is None else weight, len(parts), first, len(out), count,
        HEADS=heads, DIM=dim, DIM_BLOCK=triton.next_power_of_2(dim), ROWS=rows, HAS_WEIGHT=weight is not None,
        num_warps=4,
    )  # fmt: skip
