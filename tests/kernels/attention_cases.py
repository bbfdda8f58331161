"""Cases of the cache's write path and of attention in both phases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from case_table import Context, Outputs, activations, case, new_context, normal, segment_over

from bifolio.kernels.interface import AttentionPhase, AttentionShape, Batch, Heads, KernelSet, LayerAttention, Norm
from bifolio.long_rope import LONG_ROPE

PREFILL, DECODE = AttentionPhase.PREFILL, AttentionPhase.DECODE
SHAPES = {
    "grouped": (4, 2, 64, None, 0.0),
    "odd": (7, 1, 80, None, 0.0),
    "window": (4, 4, 32, 20, 0.0),
    "soft-capped": (4, 2, 64, 50, 0.7),
    "growing": (4, 2, 64, None, 0.0, 0.3, 8),
    "large": (2, 1, 512, None, 0.0),
    "chunked": (4, 2, 64, 20, 0.0),
    "biased": (6, 3, 64, None, 0.0),
    "biased by window": (4, 2, 64, 24, 0.0, 0.3, 8),
}  # query heads, key heads, head size, window, soft cap, temperature and its period


def shape_of(name: str) -> AttentionShape:
    heads, kv_heads, dim, window, softcap, *growth = SHAPES[name]
    temperature = dict(zip(("temperature", "temperature_period"), growth, strict=False))
    shape = AttentionShape(1, heads, kv_heads, dim, dim**-0.5, window, softcap=softcap, **temperature)
    if "biased" in name:
        slopes = (2.0 ** -np.arange(1, heads + 1)).astype(np.float32)
        return replace(shape, slopes=slopes, temperature_start=3)
    return replace(shape, in_chunks=name == "chunked")


def on_device(kernels: KernelSet, shape: AttentionShape) -> AttentionShape:
    """The shape with its slopes as weights have them."""
    return shape if shape.slopes is None else replace(shape, slopes=kernels.from_host(shape.slopes))


# -- rope_and_write ----------------------------------------------------------------------------------------------------
def _enter_rope(
    detail: str,
    dim: int,
    rotated: int,
    interleaved: bool = False,
    norm_heads: tuple[int, int] = (0, 0),
    two_sets: bool = False,
    **order: bool,
) -> None:
    """`norm_heads`: heads that share a norm, of queries and keys; 0: no norm. `two_sets`: LongRoPE, of both lengths."""

    @case("rope_and_write", detail)
    def rope_and_write(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
        """Heads, and the keys and values that the cache holds afterwards."""
        lengths = [21, 3]
        norms = [kernels.prepare_norm(Norm(1 + normal(rng, n * dim), None, 1e-6)) if n else None for n in norm_heads]
        shape = AttentionShape(1, 6, 2, dim, 1.0, None, interleaved, *norms, **order)
        context = new_context(kernels, rng, lengths, shape.num_kv_heads, dim)
        qkv = activations(kernels, normal(rng, sum(lengths), 10 * dim))
        ropes = [LONG_ROPE, 0] if two_sets else [0, 0]
        places = [np.arange(length, dtype=np.int32) + rope for length, rope in zip(lengths, ropes, strict=True)]
        positions = kernels.from_host(np.concatenate(places))
        one_set = (1e4 ** -(np.arange(rotated // 2) * 2 / max(rotated, 1))).astype(np.float32)
        frequencies = kernels.from_host(np.stack([one_set, one_set / 3]) if two_sets else one_set)
        rotation = kernels.rotation(frequencies, 1.0, positions) if rotated else None
        batch = Batch(positions, positions, kernels.from_host(context.index), (), None)
        heads = kernels.rope_and_write(qkv, shape, rotation, batch, context.storage)
        alone = kernels.rope_and_write(qkv, shape, rotation, Batch(positions, positions, None, (), None), None)
        kept = [context.storage.gather(1, context.tables[i], length) for i, length in enumerate(lengths)]
        return tuple(kernels.to_host(part) for parts in (heads, alone, *kept) for part in parts)


_enter_rope("", 64, 64)
_enter_rope("of a part of each head", 128, 64)
_enter_rope("interleaved", 96, 96, interleaved=True)
_enter_rope("interleaved in part", 96, 48, interleaved=True)
_enter_rope("of normed heads", 80, 80, norm_heads=(1, 1))
_enter_rope("of heads normed together", 80, 64, norm_heads=(6, 2))
_enter_rope("of heads normed afterwards", 80, 64, norm_heads=(1, 1), norm_after_rope=True)
_enter_rope("without rotation", 64, 0)
_enter_rope("by one of two sets", 64, 48, two_sets=True)


@case("rope_and_write", "of normed values")
def rope_and_normed_values(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Values are normed where they are returned and where they are cached."""
    dim, length = 80, 21
    norms = [kernels.prepare_norm(Norm(1 + normal(rng, dim), None, 1e-6)) for _ in range(3)]
    shape = AttentionShape(1, 6, 2, dim, 1.0, None, False, *norms)
    context = new_context(kernels, rng, [length], shape.num_kv_heads, dim)
    qkv = activations(kernels, normal(rng, length, 10 * dim))
    positions = kernels.from_host(np.arange(length, dtype=np.int32))
    batch = Batch(positions, positions, kernels.from_host(context.index), (), None)
    heads = kernels.rope_and_write(qkv, shape, None, batch, context.storage)
    kept = context.storage.gather(1, context.tables[0], length)
    return tuple(kernels.to_host(part) for part in (*heads, *kept))


@case("rope_and_write", "of queries alone")
def rope_of_queries(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A layer that reads the keys and values of another one leaves the cache as it is."""
    dim, length = 64, 21
    norm = kernels.prepare_norm(Norm(1 + normal(rng, dim), None, 1e-6))
    shape = AttentionShape(1, 6, 2, dim, 1.0, query_norm=norm, queries_only=True)
    context = new_context(kernels, rng, [length], shape.num_kv_heads, dim)
    positions = kernels.from_host(np.arange(length, dtype=np.int32))
    frequencies = kernels.from_host((1e4 ** -(np.arange(32) / 32)).astype(np.float32))
    batch = Batch(positions, positions, kernels.from_host(context.index), (), None)
    query = activations(kernels, normal(rng, length, 6 * dim))
    heads = kernels.rope_and_write(query, shape, kernels.rotation(frequencies, 1.0, positions), batch, context.storage)
    assert (heads.key, heads.value) == (None, None)
    return tuple(kernels.to_host(part) for part in (heads.query, *context.storage.gather(1, context.tables[0], length)))


# -- attend ------------------------------------------------------------------------------------------------------------
def attend(
    kernels: KernelSet,
    query: np.ndarray,
    shape: AttentionShape,
    context: Context,
    phase: AttentionPhase,
    queries: Sequence[int],
    lengths: Sequence[int],
) -> np.ndarray:
    """[t, num_heads * head_dim] of one segment over its cached context."""
    segment = segment_over(kernels, phase, queries, lengths, context.tables)
    layer = LayerAttention(kernels, on_device(kernels, shape), context.storage)
    return kernels.to_host(layer.compute_paged_attention(activations(kernels, query), segment))


def _enter_phases(name: str) -> None:
    shape = shape_of(name)

    @case("attend", f"in both phases, {name} heads")
    def both_phases(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
        """One query of each sequence: a decode segment and a prefill segment give the same."""
        lengths, ones = [1, 33, 130, 16], [1] * 4
        context = new_context(kernels, rng, lengths, shape.num_kv_heads, shape.head_dim)
        query = normal(rng, 4, shape.num_heads, shape.head_dim)
        return tuple(attend(kernels, query, shape, context, phase, ones, lengths) for phase in (DECODE, PREFILL))

    @case("attend", f"to drafts, {name} heads")
    def drafts(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
        """Several queries of each sequence in a decode segment, and the same in a prefill segment."""
        lengths, queries = [40, 5, 70], [3, 3, 3]
        context = new_context(kernels, rng, lengths, shape.num_kv_heads, shape.head_dim)
        query = normal(rng, sum(queries), shape.num_heads, shape.head_dim)
        return tuple(attend(kernels, query, shape, context, phase, queries, lengths) for phase in (DECODE, PREFILL))

    @case("attend", f"behind a prefix, {name} heads")
    def behind_prefix(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
        lengths, queries = [33, 70, 5], [20, 2, 5]
        context = new_context(kernels, rng, lengths, shape.num_kv_heads, shape.head_dim)
        query = normal(rng, sum(queries), shape.num_heads, shape.head_dim)
        return (attend(kernels, query, shape, context, PREFILL, queries, lengths),)

    @case("attend", f"to fresh prompts, {name} heads")
    def fresh_prompts(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
        """Packed prompts over their own keys and values: with a cache, of unequal and equal lengths, and without."""
        found, own = [], on_device(kernels, shape)
        for lengths in ([17, 40, 3], [24, 24]):
            context = new_context(kernels, rng, lengths, shape.num_kv_heads, shape.head_dim)
            sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
            heads = Heads(*(activations(kernels, normal(rng, sum(lengths), n, shape.head_dim)) for n in sizes))
            batch_index = kernels.from_host(context.index)
            context.storage.write(1, batch_index, heads.key, heads.value)
            for tables, storage in ((context.tables, context.storage), (None, None)):
                segment = segment_over(kernels, PREFILL, lengths, lengths, tables)
                found.append(kernels.to_host(kernels.attend(heads, own, (segment,), storage)))
        return tuple(found)


for _name in SHAPES:
    _enter_phases(_name)


def _enter_texts(detail: str, reach: int | None = None, **fields: Any) -> None:
    """`reach`: of a bias by distance."""

    @case("attend", f"to whole texts, {detail}")
    def whole_texts(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
        """Texts whose tokens see each other: with a cache and without, of unequal and equal lengths."""
        bias = None if reach is None else kernels.from_host(normal(rng, 6, 2 * reach + 1))
        shape, found = AttentionShape(1, 6, 2, 64, 0.125, bidirectional=True, bias=bias, **fields), []
        for lengths in ([17, 70, 1, 33], [24, 24]):
            context = new_context(kernels, rng, lengths, 2, 64)
            heads = Heads(*(activations(kernels, normal(rng, sum(lengths), n, 64)) for n in (6, 2, 2)))
            context.storage.write(1, kernels.from_host(context.index), heads.key, heads.value)
            for tables, storage in ((context.tables, context.storage), (None, None)):
                segment = segment_over(kernels, PREFILL, lengths, lengths, tables)
                found.append(kernels.to_host(kernels.attend(heads, shape, (segment,), storage)))
        return tuple(found)


_enter_texts("all of them")
_enter_texts("in a window", window=11)
_enter_texts("with a bias by distance", reach=69)
_enter_texts("with a bias that ends early, in a window", reach=5, window=20)


@case("attend", "to two segments")
def two_segments(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A mixed step: decodes, then a chunk behind a prefix."""
    shape, lengths = shape_of("grouped"), [50, 17, 60]
    context = new_context(kernels, rng, lengths, shape.num_kv_heads, shape.head_dim)
    heads = Heads(
        activations(kernels, normal(rng, 22, shape.num_heads, shape.head_dim)),
        *(activations(kernels, normal(rng, 22, shape.num_kv_heads, shape.head_dim)) for _ in range(2)),
    )
    segments = (
        segment_over(kernels, DECODE, [1, 1], lengths[:2], context.tables[:2]),
        segment_over(kernels, PREFILL, [20], lengths[2:], context.tables[2:], token_start=2),
    )
    return (kernels.to_host(kernels.attend(heads, shape, segments, context.storage)),)
