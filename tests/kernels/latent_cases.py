"""Cases of attention over cached latents, and of attention sinks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from attention_cases import DECODE, PREFILL, attend, shape_of
from case_table import Outputs, activations, case, new_context, normal, segment_over
from network_cases import ROUNDED, matrix, new_norm

from bifolio.kernels.interface import AttentionPhase, AttentionShape, HeadLinear, Heads, KernelSet, Linear
from bifolio.kernels.storage import CacheLayout
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

HEADS, ROPE, LATENT, NOPE = 4, 8, 32, 16
ROWS = (1, 3, 40)
CONTEXTS = [130, 14, 9, 40]  # of queries that choose positions: all of a sequence, some of them, or none
PASSES = [  # phase, and queries of each sequence
    (PREFILL, [9, 6, 9, 40]),
    (DECODE, [1, 1, 1, 1]),
    (DECODE, [3, 3, 3, 3]),
]
FRESH: tuple[AttentionPhase, list[int]] = (PREFILL, CONTEXTS)
TOP_K = 12


def by_head(rng: np.random.Generator, rows: int, columns: int) -> HeadLinear:
    return HeadLinear(tuple(Linear((matrix(rng, rows, columns),), (None,)) for _ in range(HEADS)))


@case("head_linear")
def head_linear(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """All columns of a head, the first, and the last of them."""
    found = []
    for start, inputs in ((0, 40), (0, 24), (16, 24)):
        prepared = kernels.prepare_head_linear(by_head(rng, 20, inputs))
        for rows in ROWS:
            x = activations(kernels, normal(rng, rows, HEADS * 40))
            found.append(kernels.to_host(kernels.head_linear(x, prepared, start)))
    return tuple(found)


@case("prepare_head_linear", rounding=ROUNDED)
def prepare_head_linear(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    heads = tuple(
        Linear((QuantizedTensor.quantize(matrix(rng, 24, 64), QuantFormat.Q8_0),), (None,)) for _ in range(HEADS)
    )
    prepared = [kernels.prepare_head_linear(HeadLinear(heads)) for _ in range(2)]
    x = activations(kernels, normal(rng, 3, HEADS * 64))
    return tuple(kernels.to_host(kernels.head_linear(x, each, 0)) for each in prepared)


@case("join_latent")
def join_latent(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    norm = kernels.prepare_norm(new_norm(rng, LATENT))
    found = []
    for rows in ROWS:
        widths = HEADS * (NOPE + ROPE), HEADS * LATENT, LATENT + ROPE
        query, absorbed, latent = (activations(kernels, normal(rng, rows, width)) for width in widths)
        found.append(kernels.to_host(kernels.join_latent(query, absorbed, latent, norm, ROPE)))
    return tuple(found)


@case("rope_and_write", "of latents")
def write_latents(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """A cache whose values are its keys holds the rotated key."""
    from bifolio.kernels.interface import Batch

    dim, tokens = ROPE + LATENT, 6
    storage = kernels.new_storage(CacheLayout(1, 4, 4, 1, dim, kernels.kv_dtype, poison=True, shared_values=True))
    assert storage.num_bytes == 4 * storage.layout.bytes_per_block
    shape = AttentionShape(0, HEADS, 1, dim, 0.2, rope_interleaved=True)
    positions = kernels.from_host(np.arange(tokens, dtype=np.int32))
    frequencies = kernels.from_host((1e4 ** -(np.arange(ROPE // 2) / 4)).astype(np.float32))
    index = kernels.from_host(np.array([4, 5, 6, 7, 12, 13], np.int64))
    batch = Batch(positions, positions, index, (), None)
    qkv = activations(kernels, normal(rng, tokens, (HEADS + 2) * dim))
    heads = kernels.rope_and_write(qkv, shape, kernels.rotation(frequencies, 1.0, positions), batch, storage)
    storage.move_blocks([(3, 2)])
    gathered = [part for blocks in ([1, 3], [1, 2]) for part in storage.gather(0, blocks, tokens)]
    return tuple(kernels.to_host(part) for part in (heads.query, heads.key, *gathered))


@case("choose")
def choose(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """The positions of an indexer's heads, with a cache and without."""
    shape, found = AttentionShape(1, HEADS, 1, 32, 0.3, top_k=TOP_K), []
    for phase, queries in (*PASSES, FRESH):
        context = new_context(kernels, rng, CONTEXTS, 1, shape.head_dim)
        count = sum(queries)
        sizes = (HEADS, 1, 1) if phase is PREFILL else (HEADS,)
        parts = [activations(kernels, normal(rng, count, n, shape.head_dim)) for n in sizes]
        weights = activations(kernels, normal(rng, count, HEADS))
        is_fresh = queries == CONTEXTS
        segment = segment_over(kernels, phase, queries, CONTEXTS, None if is_fresh else context.tables)
        heads = Heads(*(parts if is_fresh else (parts[0], None, None)))
        own = None if is_fresh else context.storage
        found.append(kernels.to_host(kernels.choose(heads, weights, shape, (segment,), own)))
    return tuple(found)


@case("choose", "of equal scores")
def choose_equal(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Of positions with equal scores the first are chosen."""
    shape, length = AttentionShape(1, 1, 1, 16, 1.0, top_k=4), 9
    query, key = np.ones((length, 1, 16), np.float32), np.zeros((length, 1, 16), np.float32)
    key[[2, 5]] = 1.0
    segment = segment_over(kernels, PREFILL, [length], [length], None)
    heads = Heads(*(activations(kernels, part) for part in (query, key, key)))
    weights = activations(kernels, np.ones((length, 1), np.float32))
    found = kernels.to_host(kernels.choose(heads, weights, shape, (segment,), None))
    assert found[4:].tolist() == [[0, 1, 2, 3], *[[0, 1, 2, 5]] * 4]
    return (found,)


def random_choice(rng: np.random.Generator, queries: list[int]) -> np.ndarray:
    """Positions of each query of a pass, as `choose` returns them."""
    ends = [end for count, length in zip(queries, CONTEXTS, strict=True) for end in range(length - count, length)]
    rows = [np.sort(rng.permutation(end + 1)[:TOP_K]) if end >= TOP_K else np.full(TOP_K, -1) for end in ends]
    return np.stack(rows).astype(np.int32)


@case("attend_chosen")
def attend_chosen(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Queries that choose positions and others in one pass, with a cache and without; and others alone."""
    shape, found = AttentionShape(1, HEADS, 1, ROPE + LATENT, 0.2, top_k=TOP_K), []
    for phase, queries in (*PASSES, FRESH):
        context = new_context(kernels, rng, CONTEXTS, 1, shape.head_dim, shared_values=True)
        query, key = (activations(kernels, normal(rng, sum(queries), n, shape.head_dim)) for n in (HEADS, 1))
        chosen = random_choice(rng, queries)
        none = np.full((sum(queries), max(CONTEXTS)), -1, np.int32)
        is_fresh = queries == CONTEXTS
        segment = segment_over(kernels, phase, queries, CONTEXTS, None if is_fresh else context.tables)
        own = None if is_fresh else context.storage
        for own_choice in (chosen, none):
            each = replace(shape, top_k=own_choice.shape[1])
            mixed = kernels.attend_chosen(Heads(query, key, key), kernels.from_host(own_choice), each, (segment,), own)
            found.append(kernels.to_host(mixed))
    return tuple(found)


@case("attend", "with sinks")
def attend_sinks(kernels: KernelSet, rng: np.random.Generator) -> Outputs:
    """Contexts of one piece and of several, chunks and single queries, with a window and without."""
    found = []
    for window in (None, 20):
        shape = shape_of("grouped")
        sinks = kernels.from_host(np.linspace(-2, 3, shape.num_heads).astype(np.float32))
        shape = replace(shape, sinks=sinks, window=window)
        lengths = [130, 17, 300]
        context = new_context(kernels, rng, lengths, shape.num_kv_heads, shape.head_dim)
        for phase, queries in ((DECODE, [1, 1, 1]), (PREFILL, [9, 17, 5])):
            query = normal(rng, sum(queries), shape.num_heads, shape.head_dim)
            found.append(attend(kernels, query, shape, context, phase, queries, lengths))
    return tuple(found)
