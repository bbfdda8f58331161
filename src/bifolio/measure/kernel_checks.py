"""Every GPU kernel against the reference in float32, over odd shapes: the first half of a GPU benchmark.

The same checks run in Triton's interpreter (tests, small shapes) and on a GPU. Inputs are drawn fresh, outputs are
poisoned before they are computed where they are written in place, and the error is |out - reference| / |reference|.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bifolio.kernels.interface import (
    AttentionPhase,
    AttentionShape,
    Batch,
    Heads,
    Linear,
    Norm,
    Rotation,
)
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton.cache import copy_blocks
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.measure.check_bench import (
    Bench,
    Named,
    brief,
    describe,
    expected_attention,
    fill,
    new_context,
    relative_error,
    segment_of,
)
from bifolio.measure.described_checks import described_checks
from bifolio.measure.quantised_checks import quantised_checks
from bifolio.measure.shared_checks import shared_checks

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison, ready to run."""

    name: str
    error: Callable[[], float]
    tolerance: float


def all_checks(kernels: TritonKernels, *, large: bool = False, seed: int = 0) -> Iterator[Check]:
    """Small shapes for the interpreter; `large` adds those that only a GPU gets through in time."""
    bench = Bench(kernels, seed)
    tolerance = TOLERANCE[kernels.dtype]
    for name, error in (
        *_norm_checks(bench, large),
        *_product_checks(bench, large),
        *described_checks(bench, large),
        *_rope_checks(bench, large),
        *_decode_checks(bench, large),
        *shared_checks(bench, large),
        *_prefill_checks(bench, large),
        *_copy_checks(bench),
        *quantised_checks(bench, large),
    ):
        yield Check(f"{NAMES[kernels.dtype]} {name}", error, tolerance)


# -- norms, activations, products ------------------------------------------------------------------------------------
def _norm_checks(bench: Bench, large: bool) -> Iterator[Named]:
    for rows, width, centered in (
        (1, 64, False),
        (3, 80, True),
        (5, 576, False),
        *(((700, 4096, False),) if large else ()),
    ):

        def error(rows: int = rows, width: int = width, centered: bool = centered) -> float:
            norm = Norm(
                bench.normal(width, dtype=torch.float32),
                bench.normal(width, dtype=torch.float32) if centered else None,
                1e-5,
                centered,
            )
            x, delta = bench.normal(rows, width), bench.normal(rows, width)
            total, normed = bench.kernels.add_norm(x, delta, norm)
            expected_total = (x + delta).float()
            expected = bench.reference.norm(expected_total, norm)
            alone = relative_error(tensor(bench.kernels.norm(x, norm)), bench.reference.norm(x.float(), norm))
            return max(relative_error(total, expected_total), relative_error(tensor(normed), expected), alone)

        yield f"norm {rows}x{width}{' centered' if centered else ''}", error
    for activation in ("silu", "gelu_tanh", "gelu"):

        def act_error(activation: str = activation) -> float:
            x = bench.normal(7, 2 * 72, scale=2.0)
            return relative_error(bench.kernels.act_mul(x, activation), bench.reference.act_mul(x.float(), activation))

        yield f"act_mul {activation}", act_error


def _product_checks(bench: Bench, large: bool) -> Iterator[Named]:
    shapes = [(1, 48, 64), (1, 33, 80), (2, 48, 64), (5, 33, 80), (16, 70, 96)]
    if large:
        shapes += [(1, 3072, 2048), (1, 1024, 3072), (16, 4096, 4096), (9, 2048, 8192), (1, 50001, 512), (64, 512, 512)]
        shapes += [(64, 4096, 4096), (33, 40000, 512), (24, 1024, 3072), (48, 2048, 8192), (2, 6144, 4096)]
        shapes += [(17, 6144, 4096), (33, 4100, 1000), (48, 4096, 4096), (64, 2048, 2048), (64, 4096, 14336)]
        shapes += [(40, 3072, 2044), (64, 14336, 4096), (112, 14336, 4096), (70, 3072, 1024)]
    for rows, outputs, depth in shapes:
        for extra in ("plain", "norm", "bias", "residual", "gated"):

            def error(rows: int = rows, outputs: int = outputs, depth: int = depth, extra: str = extra) -> float:
                return _product_error(bench, rows, outputs, depth, extra)

            yield f"linear {rows}x{outputs}x{depth} {extra}", error
        if rows > 1:

            def chain_error(rows: int = rows, outputs: int = outputs, depth: int = depth) -> float:
                return _chain_error(bench, rows, outputs, depth)

            yield f"linear, added, normed, linear {rows}x{outputs}x{depth}", chain_error


def _chain_error(bench: Bench, rows: int, outputs: int, depth: int) -> float:
    """Of the sum between two products, of its norm, and of the second product, which may do half of that norm."""
    kernels, reference = bench.kernels, bench.reference
    matrices = bench.normal(depth, outputs, scale=outputs**-0.5), bench.normal(outputs, depth, scale=depth**-0.5)
    layers = [Linear((matrix,), (None,)) for matrix in matrices]
    first, second = (kernels.prepare_linear(layer) for layer in layers)
    norm = Norm(bench.normal(depth, dtype=torch.float32), None, 1e-5)
    x, residual = bench.normal(rows, outputs), bench.normal(rows, depth, dtype=torch.float32)
    total, normed = kernels.add_norm(residual, kernels.linear(x, first), norm)
    result = tensor(kernels.linear(normed, second))
    expected = residual + reference.linear(x.float(), reference.prepare_linear(layers[0]))
    expected_normed = reference.norm(expected, norm)
    expected_result = reference.linear(expected_normed, reference.prepare_linear(layers[1]))
    return max(
        relative_error(total, expected),
        relative_error(result, expected_result),
        relative_error(tensor(normed), expected_normed),
    )


def _product_error(bench: Bench, rows: int, outputs: int, depth: int, extra: str) -> float:
    kernels, reference = bench.kernels, bench.reference
    parts = tuple(bench.normal(outputs, depth, scale=depth**-0.5) for _ in range(2 if extra == "gated" else 1))
    biases = tuple(bench.normal(outputs) if extra == "bias" else None for _ in parts)
    ours = kernels.prepare_linear(Linear(parts, biases))
    theirs = reference.prepare_linear(Linear(parts, biases))
    x = bench.normal(rows, depth)
    norm = Norm(bench.normal(depth, dtype=torch.float32), None, 1e-5)
    source: Any = kernels.norm(x, norm) if extra in ("norm", "gated") else x
    expected_source = reference.norm(x.float(), norm) if extra in ("norm", "gated") else x.float()
    result, expected = kernels.linear(source, ours), reference.linear(expected_source, theirs)
    if extra == "gated":
        result, expected = kernels.act_mul(result, "silu"), reference.act_mul(expected, "silu")
    if extra == "residual":
        residual = bench.normal(rows, outputs)
        result, expected = kernels.add(residual, result), residual.float() + expected
    return relative_error(tensor(result), expected)


# -- attention ---------------------------------------------------------------------------------------------------------
def _shape(heads: int, kv_heads: int, dim: int, window: int | None = None) -> AttentionShape:
    return AttentionShape(0, heads, kv_heads, dim, dim**-0.5, window)


def _decode_checks(bench: Bench, large: bool) -> Iterator[Named]:
    cases = [
        (_shape(4, 1, 64), [1], 16),
        (_shape(4, 2, 64), [15, 16, 17], 16),
        (_shape(7, 1, 80), [200, 1, 63, 64, 65], 16),
        (_shape(2, 2, 96), [130, 5], 64),
        (_shape(8, 2, 128), [257, 3], 32),
        (_shape(4, 2, 64, 20), [100, 300, 7], 16),
        (_shape(2, 1, 256), [70], 8),
    ]
    if large:
        cases += [
            (_shape(32, 8, 128), [2048] * 16 + [1, 777, 8191], 64),
            (_shape(32, 8, 64), [5000], 64),
            (_shape(16, 8, 128), list(range(1, 900, 7)), 16),
            (_shape(28, 4, 128, 1024), [3000, 1023, 1024, 1025], 16),
            (_shape(32, 32, 80), [400, 90], 16),
            (_shape(8, 1, 256), [1500, 2], 64),
        ]
    for shape, lengths, block_size in cases:

        def error(shape: AttentionShape = shape, lengths: list[int] = lengths, block_size: int = block_size) -> float:
            context = new_context(bench, shape, lengths, block_size)
            fill(bench, context, shape)
            query = bench.normal(len(lengths), shape.num_heads, shape.head_dim)
            ones = [1] * len(lengths)
            segment = segment_of(AttentionPhase.DECODE, ones, lengths, context.tables)
            worst = 0.0
            expected = expected_attention(bench, query, shape, context, ones)
            for _ in range(2):  # twice: what a launch leaves behind must not disturb the next
                result = bench.kernels.attend(Heads(query, None, None), shape, (segment,), context.storage)
                worst = max(worst, relative_error(result, expected))
            return worst

        yield f"decode {describe(shape)} block {block_size} lengths {brief(lengths)}", error


def _prefill_checks(bench: Bench, large: bool) -> Iterator[Named]:
    cases = [
        (_shape(4, 1, 64), [1, 5], [1, 5], 16),
        (_shape(4, 2, 64), [17, 40, 3], [17, 40, 3], 16),
        (_shape(2, 2, 80), [20, 2], [33, 70], 16),
        (_shape(4, 4, 96), [5, 1, 4], [68, 1, 20], 64),
        (_shape(4, 2, 64, 10), [30, 9], [30, 50], 16),
        (_shape(2, 1, 128), [35], [70], 32),
    ]
    if large:
        cases += [
            (_shape(32, 8, 128), [700, 1, 129, 64], [700, 900, 129, 1064], 64),
            (_shape(32, 8, 64), [1024, 1024], [1024, 1024], 64),  # torch's own attention
            (_shape(32, 8, 128), [2500], [2500], 64),
            (_shape(16, 8, 128), [300, 511, 512, 513], [300, 511, 512, 513], 16),
            (_shape(28, 4, 128, 256), [600, 100], [600, 1100], 16),
            (_shape(8, 1, 256), [150, 20], [150, 600], 64),
        ]
    for shape, query_lens, lengths, block_size in cases:

        def error(
            shape: AttentionShape = shape,
            query_lens: list[int] = query_lens,
            lengths: list[int] = lengths,
            block_size: int = block_size,
        ) -> float:
            return _prefill_error(bench, shape, query_lens, lengths, block_size)

        yield f"prefill {describe(shape)} block {block_size} {brief(query_lens)} of {brief(lengths)}", error


def _prefill_error(
    bench: Bench, shape: AttentionShape, query_lens: list[int], lengths: list[int], block_size: int
) -> float:
    context = new_context(bench, shape, lengths, block_size)
    fill(bench, context, shape)
    query = bench.normal(sum(query_lens), shape.num_heads, shape.head_dim)
    segment = segment_of(AttentionPhase.PREFILL, query_lens, lengths, context.tables)
    heads = Heads(query, None, None)
    if segment.fresh:
        size = context.storage.block_size
        slots = torch.cat(context.slots)
        heads = Heads(
            query,
            context.storage.keys[shape.layer][slots // size, :, slots % size],
            context.storage.values[shape.layer][slots // size, :, slots % size],
        )
    result = bench.kernels.attend(heads, shape, (segment,), context.storage)
    return relative_error(result, expected_attention(bench, query, shape, context, query_lens))


# -- the cache -------------------------------------------------------------------------------------------------------
def _rope_checks(bench: Bench, large: bool) -> Iterator[Named]:
    for dim, rotated, interleaved, normed in (
        (64, 64, False, False),
        (80, 80, False, True),
        (96, 96, True, False),
        (128, 64, False, True),
        (64, 0, False, False),
        *(((256, 256, False, True),) if large else ()),
    ):

        def error(
            dim: int = dim, rotated: int = rotated, interleaved: bool = interleaved, normed: bool = normed
        ) -> float:
            return _rope_error(bench, dim, rotated, interleaved, normed, 300 if large else 5)

        yield f"rope {dim} rotated {rotated}{' interleaved' * interleaved}{' normed' * normed}", error


def _rope_error(bench: Bench, dim: int, rotated: int, interleaved: bool, normed: bool, tokens: int) -> float:
    norms = [Norm(bench.normal(dim, dtype=torch.float32), None, 1e-6) for _ in range(2)] if normed else [None, None]
    shape = AttentionShape(0, 6, 2, dim, 1.0, None, interleaved, *norms)
    angles = bench.normal(tokens, max(rotated // 2, 1), scale=3.0, dtype=torch.float32)
    rotation = Rotation(angles.cos(), angles.sin()) if rotated else None
    qkv = bench.normal(tokens, 10 * dim)
    contexts = [new_context(bench, shape, [tokens], 16) for _ in range(2)]
    slots = contexts[0].slots[0]
    batch = Batch(slots, slots, slots, (), None)
    ours = bench.kernels.rope_and_write(qkv, shape, rotation, batch, contexts[0].storage)
    theirs = bench.reference.rope_and_write(qkv.float(), shape, rotation, batch, contexts[1].storage)
    pairs = [(ours.query, theirs.query), (ours.key, theirs.key), (ours.value, theirs.value)]
    for a, b in zip(*((c.storage.keys[0], c.storage.values[0]) for c in contexts), strict=True):
        pairs.append((a[slots // 16, :, slots % 16], b[slots // 16, :, slots % 16]))
    return max(relative_error(a, b) for a, b in pairs)


def _copy_checks(bench: Bench) -> Iterator[Named]:
    def error() -> float:
        cache = bench.normal(6, 9, 2, 4, 24)
        expected = cache.clone()
        expected[:, [3, 4, 7]] = cache[:, [1, 1, 8]]
        copy_blocks(cache, bench.integers([[1, 3], [1, 4], [8, 7]]))
        return relative_error(cache, expected)

    yield "copy blocks", error
