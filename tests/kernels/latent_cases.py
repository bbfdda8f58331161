"""Cases of attention over cached latents, and of attention sinks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from attention_cases import DECODE, PREFILL, attend, shape_of
from case_table import Outputs, activations, case, new_context, normal
from network_cases import ROUNDED, matrix, new_norm

from bifolio.kernels.interface import AttentionShape, HeadLinear, KernelSet, Linear
from bifolio.kernels.storage import CacheLayout
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

HEADS, ROPE, LATENT, NOPE = 4, 8, 32, 16
ROWS = (1, 3, 40)


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
