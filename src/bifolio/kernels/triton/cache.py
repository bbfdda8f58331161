# mypy: disallow-untyped-decorators=False
"""The KV cache on a GPU: its storage, copies of blocks, and head norms, rotation and write of K and V in one kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from bifolio.kernels.interface import Array, AttentionShape, Heads, Rotation, Storage
from bifolio.kernels.storage import FP8_LARGEST, KVStorage
from bifolio.kernels.torch_arrays import upload
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs

HEADS_PER_PROGRAM = 8
PACKED_WORDS = 2048  # that one program copies
LARGEST = tl.constexpr(FP8_LARGEST)


@triton.jit(do_not_specialize_on_alignment=["slots", "cos", "sin"])
def _rope_write_kernel(
    qkv: tl.tensor,  # [tokens, (heads + 2 * kv_heads) * dim]
    query_norm: tl.tensor,  # [dim], or [heads * dim] if ALL_HEADS
    key_norm: tl.tensor,
    value_norm: tl.tensor,  # [dim]
    cos: tl.tensor,  # f32[tokens, rotated / 2]
    sin: tl.tensor,
    slots: tl.tensor,  # i64[tokens]
    turned: tl.tensor,  # [tokens, heads + kv_heads, dim]  queries, then keys; and values if HAS_VALUE_NORM
    keys: tl.tensor,  # [blocks, kv_heads, block_size, dim]
    values: tl.tensor,
    qkv_stride: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    ROTATED: tl.constexpr,  # leading dimensions that are rotated; 0: none
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ALL_HEADS: tl.constexpr,  # one norm for all query heads of a token, and one for all key heads
    NORM_AFTER: tl.constexpr,  # the norm follows the rotation
    HAS_VALUE_NORM: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,  # values are the keys
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dim = tl.arange(0, DIM_BLOCK)
    exists = (head < HEADS + 2 * KV_HEADS)[:, None] & (dim < DIM)[None, :]
    is_query = (head < HEADS)[:, None]
    is_turned = (head < HEADS + KV_HEADS)[:, None]
    source = qkv + token * qkv_stride + head[:, None] * DIM
    if ROTATED > 0:
        half: tl.constexpr = ROTATED // 2
        if INTERLEAVED:
            partner = dim ^ 1
            angle = dim // 2
            is_first = dim % 2 == 0
        else:
            partner = tl.where(dim < half, dim + half, dim - half)
            angle = tl.where(dim < half, dim, dim - half)
            is_first = dim < half
        turns = dim < ROTATED
        cosine = tl.load(cos + token * half + angle, mask=turns, other=1.0)[None, :]
        sine = tl.load(sin + token * half + angle, mask=turns, other=0.0)
        sine = tl.where(is_first, -sine, sine)[None, :]
    if HAS_CACHE:
        slot = tl.load(slots + token)
    if HAS_NORM:
        factor = _norm_weights(query_norm, key_norm, head, dim, dim < DIM, HEADS, KV_HEADS, DIM, ALL_HEADS)
        if ROTATED > 0:
            other_factor = _norm_weights(query_norm, key_norm, head, partner, turns, HEADS, KV_HEADS, DIM, ALL_HEADS)
    wait_for_inputs()
    x = tl.load(source + dim[None, :], mask=exists, other=0.0).to(tl.float32)
    inverse = tl.zeros([TILE, 1], tl.float32) + 1.0
    if HAS_NORM and not NORM_AFTER:
        if ALL_HEADS:
            first = qkv + token * qkv_stride
            spread = tl.where(
                is_query, _mean_square(first, HEADS * DIM), _mean_square(first + HEADS * DIM, KV_HEADS * DIM)
            )
        else:
            spread = tl.sum(x * x, axis=1)[:, None] / DIM
        inverse = tl.where(is_turned, 1.0 / tl.sqrt(spread + eps), 1.0)
        x = x * inverse * factor
    if ROTATED > 0:
        other = tl.load(source + partner[None, :], mask=exists & turns[None, :], other=0.0).to(tl.float32)
        if HAS_NORM and not NORM_AFTER:
            other = other * inverse * other_factor
        x = tl.where(is_turned & turns[None, :], x * cosine + other * sine, x)
    if HAS_NORM and NORM_AFTER:
        spread = tl.sum(x * x, axis=1)[:, None] / DIM
        x = tl.where(is_turned, x / tl.sqrt(spread + eps) * factor, x)
    if HAS_VALUE_NORM:
        weight = tl.load(value_norm + dim, mask=dim < DIM, other=0.0).to(tl.float32)[None, :]
        spread = tl.sum(x * x, axis=1)[:, None] / DIM
        x = tl.where(is_turned, x, x / tl.sqrt(spread + eps) * weight)
        target = turned + (token * (HEADS + 2 * KV_HEADS) + head[:, None]) * DIM + dim[None, :]
        tl.store(target, x.to(turned.dtype.element_ty), mask=exists)
    else:
        target = turned + (token * (HEADS + KV_HEADS) + head[:, None]) * DIM + dim[None, :]
        tl.store(target, x.to(turned.dtype.element_ty), mask=exists & is_turned)
    if HAS_CACHE:
        kv_head = tl.where(head < HEADS + KV_HEADS, head - HEADS, head - HEADS - KV_HEADS)
        place = ((slot // BLOCK_SIZE) * KV_HEADS + kv_head[:, None]) * BLOCK_SIZE + slot % BLOCK_SIZE
        place = place * DIM + dim[None, :]
        if keys.dtype.element_ty == tl.float8e4nv:
            x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))  # NaN stays
        tl.store(keys + place, x.to(keys.dtype.element_ty), mask=exists & is_turned & (is_query == 0))
        if not SHARED:
            tl.store(values + place, x.to(values.dtype.element_ty), mask=exists & (is_turned == 0))


@triton.jit
def _norm_weights(
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    head: tl.tensor,
    dim: tl.tensor,
    inside: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ALL_HEADS: tl.constexpr,
) -> tl.tensor:
    """[heads, dim]: norm weights of queries and keys, 1 for values."""
    is_query = (head < HEADS)[:, None]
    is_key = ((head >= HEADS) & (head < HEADS + KV_HEADS))[:, None]
    if ALL_HEADS:
        query_place = query_norm + head[:, None] * DIM + dim[None, :]
        key_place = key_norm + (head[:, None] - HEADS) * DIM + dim[None, :]
        weight = tl.load(query_place, mask=inside[None, :] & is_query, other=0.0).to(tl.float32)
        key_weight = tl.load(key_place, mask=inside[None, :] & is_key, other=0.0).to(tl.float32)
    else:
        weight = tl.load(query_norm + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        key_weight = tl.load(key_norm + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query, weight, tl.where(is_key, key_weight, 1.0))


@triton.jit
def _mean_square(source: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The mean of the squares of SIZE consecutive numbers."""
    total = tl.zeros([512], tl.float32)
    for start in range(0, SIZE, 512):
        place = start + tl.arange(0, 512)
        x = tl.load(source + place, mask=place < SIZE, other=0.0).to(tl.float32)
        total += x * x
    return tl.sum(total, axis=0) / SIZE


def num_turned_heads(shape: AttentionShape) -> int:
    """Heads of one token that `rope_and_write` stores one after the other, queries first."""
    if shape.queries_only:
        return shape.num_heads
    return shape.num_heads + shape.num_kv_heads * (1 if shape.value_norm is None else 2)


def rope_and_write(
    qkv: torch.Tensor,
    shape: AttentionShape,
    rotation: Rotation | None,
    slots: torch.Tensor | None,
    storage: Storage | None,
    dtype: torch.dtype | None = None,  # of the heads; None: that of qkv
) -> Heads:
    """Norm and rotate the query and key heads; with `slots`, write keys and values to the cache.

    Heads of encoders that are neither normed nor rotated are views of `qkv`.
    """
    heads, dim, own = shape.num_heads, shape.head_dim, not shape.queries_only
    kv_heads = shape.num_kv_heads if own else 0
    tokens, value_norm = qkv.shape[0], shape.value_norm if own else None
    norms = shape.query_norm, shape.key_norm if own else shape.query_norm
    is_turned = any(part is not None for part in (rotation, *norms, value_norm))
    if shape.bidirectional and not is_turned and qkv.dtype == (dtype or qkv.dtype):
        all_own = torch.unflatten(qkv, -1, (heads + 2 * kv_heads, dim))
        return Heads(*torch.split(all_own, [heads, kv_heads, kv_heads], dim=1))
    turned = torch.empty((tokens, num_turned_heads(shape), dim), dtype=dtype or qkv.dtype, device=qkv.device)
    has_norm = norms[0] is not None and norms[1] is not None
    cached = own and storage is not None and slots is not None
    keys = storage.keys[shape.layer] if cached and storage is not None else turned
    values = storage.values[shape.layer] if cached and storage is not None else turned
    dim_block = triton.next_power_of_2(dim)
    all_heads = heads + 2 * kv_heads
    tile = min(HEADS_PER_PROGRAM, triton.next_power_of_2(all_heads))
    if tokens:
        _rope_write_kernel[(tokens, triton.cdiv(all_heads, tile))](
            qkv,
            norms[0].weight if norms[0] is not None else qkv,
            norms[1].weight if norms[1] is not None else qkv,
            qkv if value_norm is None else value_norm.weight,
            qkv if rotation is None else rotation.cos,
            qkv if rotation is None else rotation.sin,
            slots if cached else qkv,
            turned,
            keys,
            values,
            qkv.stride(0),
            norms[0].eps if norms[0] is not None else 0.0,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            DIM_BLOCK=dim_block,
            ROTATED=0 if rotation is None else 2 * rotation.cos.shape[-1],
            INTERLEAVED=shape.rope_interleaved,
            HAS_NORM=has_norm,
            ALL_HEADS=norms[0] is not None and norms[0].weight.shape[0] != dim,
            NORM_AFTER=shape.norm_after_rope,
            HAS_VALUE_NORM=value_norm is not None,
            HAS_CACHE=cached,
            BLOCK_SIZE=storage.block_size if storage is not None else 1,
            TILE=tile,
            SHARED=storage is not None and storage.layout.shared_values,
            num_warps=min(max(tile * dim_block // 256, 1), 8),
            **OVERLAPPED,
        )
    if not own:
        return Heads(turned, None, None)
    if value_norm is not None:
        return Heads(turned[:, :heads], turned[:, heads : heads + kv_heads], turned[:, heads + kv_heads :])
    value = torch.unflatten(qkv, -1, (all_heads, dim))[:, heads + kv_heads :].to(turned.dtype)
    return Heads(turned[:, :heads], turned[:, heads:], value)


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def _copy_blocks_kernel(
    cache: tl.tensor,  # i64 words of every layer's keys and values: [arrays, blocks, words]
    pairs: tl.tensor,  # i32[copies, 2]  source and destination
    array_stride: tl.tensor,
    WORDS: tl.constexpr,  # of one block in one layer
    BLOCK: tl.constexpr,
) -> None:
    pair, array = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source = tl.load(pairs + 2 * pair).to(tl.int64)
    destination = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    base = cache + array * array_stride
    for start in range(0, WORDS, BLOCK):
        words = start + tl.arange(0, BLOCK)
        inside = words < WORDS
        tl.store(base + destination * WORDS + words, tl.load(base + source * WORDS + words, mask=inside), mask=inside)


def copy_blocks(cache: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy whole blocks in every layer with one launch; no destination is a source.

    cache: [arrays, blocks, ...], contiguous, a block's bytes a multiple of 8 (or of its own element's size).
    pairs: i32[copies, 2] on the device.
    """
    if not pairs.shape[0]:
        return
    flat = cache.view(cache.shape[0], cache.shape[1], -1)
    words = flat.view(torch.int64) if flat.shape[2] * flat.element_size() % 8 == 0 else flat
    grid = (pairs.shape[0], words.shape[0])
    _copy_blocks_kernel[grid](words, pairs, words.stride(0), WORDS=words.shape[2], BLOCK=1024, num_warps=4)


@triton.jit(do_not_specialize_on_alignment=["ids", "packed", "offsets"])
def _pack_kernel(
    cache: tl.tensor,  # words of layers with equal heads: [arrays, blocks, words]
    packed: tl.tensor,  # words of whole blocks: [rows, words of a block in all layers]
    ids: tl.tensor,  # i32[rows]
    offsets: tl.tensor,  # i64[arrays]  of each array's words in a row of `packed`
    array_stride: tl.tensor,
    packed_stride: tl.tensor,
    WORDS: tl.constexpr,  # of one block in one layer
    BLOCK: tl.constexpr,
    IS_REVERSE: tl.constexpr,  # from `packed` to the cache
) -> None:
    row, array = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    words = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = words < WORDS
    stored = cache + array * array_stride + tl.load(ids + row).to(tl.int64) * WORDS + words
    piece = packed + row * packed_stride + tl.load(offsets + array) + words
    if IS_REVERSE:
        tl.store(stored, tl.load(piece, mask=inside), mask=inside)
    else:
        tl.store(piece, tl.load(stored, mask=inside), mask=inside)


def pack_words(
    cache: torch.Tensor,
    packed: torch.Tensor,
    ids: torch.Tensor,
    offsets: torch.Tensor,
    words_of: torch.dtype,
    *,
    reverse: bool,
) -> None:
    """Copy blocks of layers with equal heads to their places in whole blocks, or back, with one launch.

    cache: [arrays, blocks, ...], contiguous. packed: u8[rows, bytes]. ids: i32[rows]. offsets: i64[arrays], in words.
    """
    flat = cache.view(cache.shape[0], cache.shape[1], -1).view(words_of)
    words, pieces = flat.shape[2], packed.view(words_of)
    grid = (len(ids), flat.shape[0], triton.cdiv(words, PACKED_WORDS))
    _pack_kernel[grid](
        flat, pieces, ids, offsets, flat.stride(0), pieces.stride(0), WORDS=words, BLOCK=PACKED_WORDS,
        IS_REVERSE=reverse, num_warps=4,
    )  # fmt: skip


class CudaStorage(KVStorage):
    """A `KVStorage` whose layers of equal heads are views of one tensor: one launch moves blocks in all of them.

    A tensor is [2 * layers, blocks, kv_heads, block_size, head_dim], or [layers, ...] if values are the keys.
    """

    _wholes: dict[tuple[int, ...], Any]  # by the shape of a layer
    _taken: dict[tuple[int, ...], int]  # layers of each that are given out
    _offsets: dict[tuple[int, ...], torch.Tensor]  # i64[arrays] of each: the first word in a whole block
    _words: torch.dtype

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._wholes, self._taken, self._offsets = {}, {}, {}
        super().__init__(*arguments, **options)
        self._lay_out_blocks()

    def move_blocks(self, moves: Iterable[tuple[int, int]]) -> None:
        """As `KVStorage.move_blocks`; the block manager guarantees that no destination is a source."""
        pairs = np.array([(source, destination) for source, destination in moves], dtype=np.int32).reshape(-1, 2)
        if len(pairs):
            moved = upload(pairs, self.device)
            for whole in self._wholes.values():
                copy_blocks(whole, moved)

    def pack_blocks(self, block_ids: Sequence[int], packed: Array) -> None:
        self._pack(block_ids, packed, reverse=False)

    def unpack_blocks(self, block_ids: Sequence[int], packed: Array) -> None:
        self._pack(block_ids, packed, reverse=True)

    def _pack(self, block_ids: Sequence[int], packed: torch.Tensor, *, reverse: bool) -> None:
        ids = upload(np.array(block_ids, np.int32), self.device)
        for shape, whole in self._wholes.items():
            pack_words(whole, packed, ids, self._offsets[shape], self._words, reverse=reverse)

    def _lay_out_blocks(self) -> None:
        """Note the places of all arrays in a whole block."""
        arrays = self._arrays()
        ends = np.cumsum([array[0].numel() * array.element_size() for array in arrays])
        self._words = torch.int64 if not np.any(ends % 8) else torch.int16
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64) // self._words.itemsize
        for shape in self._wholes:
            alike = [number for number, array in enumerate(arrays) if tuple(array.shape) == shape]
            self._offsets[shape] = upload(starts[alike], self.device)

    def _allocate(self, shape: tuple[int, ...]) -> Array:
        if shape not in self._wholes:
            alike = sum(heads == (shape[1], shape[3]) for heads in self.layout.layer_heads)
            arrays = alike * (1 if self.layout.shared_values else 2)
            self._wholes[shape], self._taken[shape] = super()._allocate((arrays, *shape)), 0
        self._taken[shape] += 1
        return self._wholes[shape][self._taken[shape] - 1]
