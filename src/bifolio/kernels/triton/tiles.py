# mypy: disallow-untyped-decorators=False
"""Common parts of the attention kernels: reading a tile of keys or values, and the online softmax over it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import AttentionShape

LOG2_E = 1.4426950408889634
TILE = 64  # tokens per tile
LARGE_HEAD = 256  # dimensions; larger heads have smaller tiles, and prefixes are not shared in their layers


def prefill_tile(dim: int, dtype: torch.dtype) -> int:
    """Tokens of a tile in prefill attention, and of both phases in deterministic mode; it fits in shared memory."""
    return TILE // 2 if dtype == torch.float32 or dim > LARGE_HEAD else TILE


def product_dtype(query: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """A type as large as that in which attention multiplies (`in_product_type`)."""
    return query if cache == torch.float8_e4m3fn else cache


def score_constants(shape: AttentionShape) -> tuple[float, float]:
    """(scale, CAP) of `mix_tile`, whose softmax is to the base 2; CAP is 0 without a soft cap."""
    if shape.softcap:
        return shape.scale / shape.softcap, shape.softcap * LOG2_E
    return shape.scale * LOG2_E, 0.0


@triton.jit
def read_tile(
    cache: tl.tensor,  # [blocks, kv_heads, block_size, dim]
    table: tl.tensor,  # i32[...]  of one sequence
    start: tl.tensor,  # first token of the tile
    end: tl.tensor,  # tokens from here on are not read
    kv_head: tl.tensor,
    dim: tl.tensor,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,  # the tile may extend past the end
) -> tl.tensor:
    """[tile, dim] of one head; 0 past the end, where the cache may hold any value, NaN included."""
    offset = tl.arange(0, TILE)
    token = start + offset
    if BLOCK_SIZE % TILE == 0:
        block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
        place = (block * KV_HEADS + kv_head) * (BLOCK_SIZE * DIM) + (start % BLOCK_SIZE + offset[:, None]) * DIM
    else:
        if MASKED:
            blocks = tl.load(table + token // BLOCK_SIZE, mask=token < end, other=0).to(tl.int64)
        else:
            blocks = tl.load(table + token // BLOCK_SIZE).to(tl.int64)
        place = ((blocks[:, None] * KV_HEADS + kv_head) * BLOCK_SIZE + (token % BLOCK_SIZE)[:, None]) * DIM
    source = cache + place + dim[None, :]
    if MASKED:
        return tl.load(source, mask=(token < end)[:, None] & (dim < DIM)[None, :], other=0.0)
    if DIM != DIM_BLOCK:
        return tl.load(source, mask=(dim < DIM)[None, :] & (token >= 0)[:, None], other=0.0)
    return tl.load(source)


@triton.jit
def in_product_type(query: tl.tensor, cache: tl.tensor) -> tl.tensor:
    """Queries in the type of the cache; with an FP8 cache in f16, which FP8 becomes in one instruction and exactly."""
    if cache.dtype.element_ty != tl.float8e4nv:
        query = query.to(cache.dtype.element_ty)
    elif query.dtype == tl.bfloat16:
        query = query.to(tl.float16)
    return query


@triton.jit
def mix_tile(
    query: tl.tensor,  # [rows, dim]
    key: tl.tensor,  # [tile, dim]
    value: tl.tensor,
    visible: tl.tensor,  # bool[1 or rows, tile]
    highest: tl.tensor,  # f32[rows]
    total: tl.tensor,  # f32[rows]
    mixed: tl.tensor,  # f32[rows, dim]
    scale: tl.tensor,  # `score_constants`
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    bias: tl.tensor = 0.0,  # f32[rows, tile]  added to scores, times log2(e)
    BIASED: tl.constexpr = False,
) -> tl.tensor:
    """One step of the online softmax: (highest, total, mixed) including this tile."""
    if key.dtype == tl.float8e4nv:
        key = key.to(query.dtype)
        value = value.to(query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    if CAP > 0:
        scores = (1.0 - 2.0 / (tl.exp(2.0 * scores * scale) + 1.0)) * CAP  # tanh
        factor = 1.0
    elif BIASED:
        scores = scores * scale
        factor = 1.0
    else:
        factor = scale
    if BIASED:
        scores += bias
    if MASKED:
        scores = tl.where(visible, scores, -float("inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis=1) * factor)
    if MASKED:  # noqa: SIM108  a row without visible keys keeps weight 0
        safe = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    else:
        safe = new_highest
    weights = tl.exp2(scores * factor - safe[:, None])  # one multiply-add, masked or not: the same bits in both
    shrink = tl.exp2(highest - safe)
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None], input_precision=PRECISION)
    return new_highest, total, mixed


@triton.jit
def join_part(
    weight: tl.tensor,  # f32[rows]  log2 of the part's sum of weights; -inf: the part has no visible keys
    values: tl.tensor,  # f32[rows, dim]  its mean of values
    highest: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
) -> tl.tensor:
    """Merge one part of the context into the running softmax."""
    new_highest = tl.maximum(highest, weight)
    safe = tl.where(new_highest == -float("inf"), 0.0, new_highest)
    shrink, grow = tl.exp2(highest - safe), tl.exp2(weight - safe)
    total = tl.fma(total, shrink, grow)
    mixed = tl.fma(values, tl.broadcast_to(grow[:, None], values.shape), mixed * shrink[:, None])
    return new_highest, total, mixed
