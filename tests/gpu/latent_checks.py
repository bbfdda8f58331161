"""Checks of attention over cached latents, whose keys are the values, against torch in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from attention_checks import shape_of
from check_bench import (
    Bench,
    Check,
    Context,
    brief,
    describe,
    expected_attention,
    new_context,
    relative_error,
    segment_of,
)

from bifolio.config import KVDtype
from bifolio.kernels.interface import AttentionPhase, AttentionShape, Heads
from bifolio.kernels.storage import KVStorage
from bifolio.kernels.triton import TritonKernels

PREFILL, DECODE = AttentionPhase.PREFILL, AttentionPhase.DECODE
SMALL = [  # heads, size of a latent, queries, context lengths, block size
    (3, 272, [40, 5, 3], [70, 5, 33], 16),
    (20, 288, [7, 1], [7, 70], 64),
]
LARGE = [
    (16, 576, [700, 1, 129, 64], [700, 900, 129, 5064], 64),
    (20, 576, [300, 511, 3], [300, 2600, 9000], 16),
    (32, 576, [5], [70000], 64),
    (64, 576, [150, 20], [150, 600], 64),
    (128, 576, [33, 4], [33, 4000], 64),
    (16, 576, [1500], [6000], 64),
    (16, 576, list(range(1, 60)), list(range(1, 1770, 30)), 64),
]


def latent_checks() -> Iterator[Check]:
    for heads, dim, queries, lengths, block_size in (*SMALL, *LARGE):
        shape, large = shape_of(heads, 1, dim), dim == 576
        for fixed in (False, True):
            name = (
                f"latents {describe(shape)} block {block_size} {brief(queries)} of {brief(lengths)}{' fixed' * fixed}"
            )
            error = partial(latent_error, shape, queries, lengths, block_size, fixed)
            yield Check(name, error, large)
            if large:
                yield Check(f"{name}, FP8 cache", partial(error, dtype="fp8"), large)


def latents(bench: Bench, shape: AttentionShape, lengths: list[int], block_size: int, dtype: KVDtype | None) -> Context:
    context = new_context(bench, shape, lengths, block_size, dtype)
    layout = replace(context.storage.layout, shared_values=True)
    storage = KVStorage(layout, device=bench.device, backend="torch")
    for index in context.index:
        rows = bench.normal(len(index), 1, shape.head_dim)
        storage.write(shape.layer, index, rows, rows)
    return replace(context, storage=storage)


def latent_error(
    shape: AttentionShape,
    queries: list[int],
    lengths: list[int],
    block_size: int,
    fixed: bool,
    bench: Bench,
    *,
    dtype: KVDtype | None = None,
) -> float:
    """Of prompts, and of decodes of the same contexts; in deterministic mode both have the same bits."""
    name = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}[bench.dtype]
    kernels = TritonKernels(bench.device, name, deterministic=True) if fixed else bench.kernels
    context = latents(bench, shape, lengths, block_size, dtype)
    query = bench.normal(sum(queries), shape.num_heads, shape.head_dim)
    last = np.cumsum(queries) - 1
    found = []
    for phase, counts, rows in ((PREFILL, queries, query), (DECODE, [1] * len(lengths), query[last])):
        segment = segment_of(phase, counts, lengths, context.tables)
        results = [kernels.attend(Heads(rows, None, None), shape, (segment,), context.storage) for _ in range(2)]
        expected = expected_attention(bench, rows, shape, context, counts)
        found.append((max(relative_error(result, expected) for result in results), results[0]))
    if fixed:
        assert torch.equal(found[0][1][last], found[1][1])
    return max(error for error, _ in found)
