# mypy: disallow-untyped-decorators=False
"""Merging the parts of a context that decode attention computed separately, always in the same order."""

from __future__ import annotations

import triton
import triton.language as tl

from bifolio.kernels.triton.tiles import join_part


@triton.jit
def merge_parts(
    first: tl.tensor,
    mixed_parts: tl.tensor,
    weight_parts: tl.tensor,
    shared_words: tl.tensor,
    shared_mixed: tl.tensor,
    shared_weight: tl.tensor,
    num_sequences: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    owner: tl.tensor,
    kv_head: tl.tensor,
    num_pieces: tl.tensor,
    num_shared: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    JOINED: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
) -> None:
    """Merge the parts of one sequence and key head, those of a shared prefix first, and write the result."""
    row, dim = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    highest = tl.full([GROUP_BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    mixed = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    if SHARED_ROWS > 0:
        first_item = tl.load(shared_words + num_sequences + owner)
        member = tl.load(shared_words + 3 * num_sequences + owner)
        first_part = (first_item.to(tl.int64) * KV_HEADS + kv_head) * SHARED_ROWS + member * GROUP + row
        highest, total, mixed = _join(
            shared_mixed, shared_weight, first_part, KV_HEADS * SHARED_ROWS, num_shared, row, dim,
            highest, total, mixed, DIM, GROUP, JOINED,
        )  # fmt: skip
    own_part = tl.load(first + owner).to(tl.int64) * HEADS + kv_head * GROUP + row
    highest, total, mixed = _join(
        mixed_parts, weight_parts, own_part, HEADS, num_pieces, row, dim, highest, total, mixed,
        DIM, GROUP, JOINED,
    )  # fmt: skip
    if HAS_SINKS:
        total = with_sinks(sinks, kv_head * GROUP + row, row < GROUP, highest, total)
    place = out + (owner.to(tl.int64) * HEADS + kv_head * GROUP + row[:, None]) * DIM + dim[None, :]
    real = (row < GROUP)[:, None] & (dim < DIM)[None, :]
    tl.store(place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)


@triton.jit
def with_sinks(sinks: tl.tensor, head: tl.tensor, exists: tl.tensor, highest: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Sums of weights 2^(score - highest), with the sink of each head; scores are multiples of log2(e)."""
    return total + tl.exp2(tl.load(sinks + head, mask=exists, other=0.0) * 1.4426950408889634 - highest)


@triton.jit
def _join(
    mixed_parts: tl.tensor,
    weight_parts: tl.tensor,
    first_part: tl.tensor,  # i64[rows]  index of each row's first part
    stride: tl.tensor,  # distance between consecutive parts of a row
    count: tl.tensor,
    row: tl.tensor,
    dim: tl.tensor,
    highest: tl.tensor,  # f32[rows]
    total: tl.tensor,  # f32[rows]
    mixed: tl.tensor,  # f32[rows, dim]
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    JOINED: tl.constexpr,
) -> tl.tensor:
    """Merge these parts into the running softmax, weighted by their sums."""
    exists = row < GROUP
    real = exists[:, None] & (dim < DIM)[None, :]
    if JOINED == 1:
        for index in range(count):
            part = first_part + index * stride
            weight = tl.load(weight_parts + part, mask=exists, other=0.0, cache_modifier=".cg")
            place = mixed_parts + part[:, None] * DIM + dim[None, :]
            values = tl.load(place, mask=real, other=0.0, cache_modifier=".cg")
            highest, total, mixed = join_part(weight, values, highest, total, mixed)
    else:
        for start in range(0, count, JOINED):
            index = start + tl.arange(0, JOINED)
            inside = (index < count)[:, None] & exists[None, :]
            part = first_part[None, :] + (index * stride).to(tl.int64)[:, None]
            weight = tl.load(weight_parts + part, mask=inside, other=-float("inf"), cache_modifier=".cg")
            place = mixed_parts + part[:, :, None] * DIM + dim[None, None, :]
            values = tl.load(place, mask=inside[:, :, None] & real[None, :, :], other=0.0, cache_modifier=".cg")
            new_highest = tl.maximum(highest, tl.max(weight, axis=0))
            safe = tl.where(exists, new_highest, 0.0)
            shrink, grow = tl.exp2(highest - safe), tl.exp2(weight - safe[None, :])
            total = total * shrink + tl.sum(grow, axis=0)
            mixed = mixed * shrink[:, None] + tl.sum(values * grow[:, :, None], axis=0)
            highest = new_highest
    return highest, total, mixed
