"""Checks of decode and prefill attention, of the write path of the cache, and of block copies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from check_bench import (
    Bench,
    Check,
    brief,
    describe,
    expected_attention,
    fill,
    new_context,
    relative_error,
    rows_of,
    segment_of,
)

from bifolio.config import KVDtype
from bifolio.kernels.interface import AttentionPhase, AttentionShape, Batch, Heads, Norm, Rotation
from bifolio.kernels.triton.cache import copy_blocks


def shape_of(heads: int, kv_heads: int, dim: int, window: int | None = None) -> AttentionShape:
    return AttentionShape(0, heads, kv_heads, dim, dim**-0.5, window)


DECODES = [  # shape, context lengths, block size
    (shape_of(4, 1, 64), [1], 16),
    (shape_of(4, 2, 64), [15, 16, 17], 16),
    (shape_of(7, 1, 80), [200, 1, 63, 64, 65], 16),
    (shape_of(2, 2, 96), [130, 5], 64),
    (shape_of(8, 2, 128), [257, 3], 32),
    (shape_of(4, 2, 64, 20), [100, 300, 7], 16),
    (shape_of(2, 1, 256), [70], 8),
]
LARGE_DECODES = [
    (shape_of(32, 8, 128), [2048] * 16 + [1, 777, 8191], 64),
    (shape_of(32, 8, 64), [5000], 64),
    (shape_of(16, 8, 128), list(range(1, 900, 7)), 16),
    (shape_of(28, 4, 128, 1024), [3000, 1023, 1024, 1025], 16),
    (shape_of(32, 32, 80), [400, 90], 16),
    (shape_of(8, 1, 256), [1500, 2], 64),
]
PREFILLS = [  # shape, queries, context lengths, block size
    (shape_of(4, 1, 64), [1, 5], [1, 5], 16),
    (shape_of(4, 2, 64), [17, 40, 3], [17, 40, 3], 16),
    (shape_of(2, 2, 80), [20, 2], [33, 70], 16),
    (shape_of(4, 4, 96), [5, 1, 4], [68, 1, 20], 64),
    (shape_of(4, 2, 64, 10), [30, 9], [30, 50], 16),
    (shape_of(2, 1, 128), [35], [70], 32),
]
LARGE_PREFILLS = [
    (shape_of(32, 8, 128), [700, 1, 129, 64], [700, 900, 129, 1064], 64),
    (shape_of(32, 8, 64), [1024, 1024], [1024, 1024], 64),  # torch's own attention
    (shape_of(32, 8, 128), [2500], [2500], 64),
    (shape_of(16, 8, 128), [300, 511, 512, 513], [300, 511, 512, 513], 16),
    (shape_of(28, 4, 128, 256), [600, 100], [600, 1100], 16),
    (shape_of(8, 1, 256), [150, 20], [150, 600], 64),
    (shape_of(16, 8, 128), [3000], [9000], 64),  # parts of cuDNN, with padding
    (shape_of(8, 4, 64), [4096, 300], [28000, 300], 64),  # parts for one sequence, tiles for the other
    (shape_of(4, 2, 128), [8192], [16384], 16),
    (shape_of(4, 2, 96), [2000], [77777], 64),  # more parts than one launch merges
    (shape_of(4, 1, 256), [5000], [5000], 64),
    (shape_of(4, 2, 128, 512), [3000], [9000], 64),  # a window: tiles
]


def decode_checks() -> Iterator[Check]:
    for shape, lengths, block_size in (*DECODES, *LARGE_DECODES):
        name = f"decode {describe(shape)} block {block_size} lengths {brief(lengths)}"
        error = partial(decode_error, shape=shape, lengths=lengths, block_size=block_size)
        yield Check(name, error, (shape, lengths, block_size) in LARGE_DECODES)
        if shape.num_kv_heads > 1:
            yield Check(f"{name}, FP8 cache", partial(error, dtype="fp8"), large=True)


def decode_error(
    bench: Bench, *, shape: AttentionShape, lengths: list[int], block_size: int, dtype: KVDtype | None = None
) -> float:
    context = new_context(bench, shape, lengths, block_size, dtype)
    fill(bench, context, shape)
    query = bench.normal(len(lengths), shape.num_heads, shape.head_dim)
    ones = [1] * len(lengths)
    segment = segment_of(AttentionPhase.DECODE, ones, lengths, context.tables)
    expected = expected_attention(bench, query, shape, context, ones)
    heads = Heads(query, None, None)
    results = [bench.kernels.attend(heads, shape, (segment,), context.storage) for _ in range(2)]
    return max(relative_error(result, expected) for result in results)  # a launch must not disturb the next


def prefill_checks() -> Iterator[Check]:
    for shape, query_lens, lengths, block_size in (*PREFILLS, *LARGE_PREFILLS):
        name = f"prefill {describe(shape)} block {block_size} {brief(query_lens)} of {brief(lengths)}"
        error = partial(prefill_error, shape=shape, query_lens=query_lens, lengths=lengths, block_size=block_size)
        yield Check(name, error, (shape, query_lens, lengths, block_size) in LARGE_PREFILLS)
        if shape.num_kv_heads > 1:
            yield Check(f"{name}, FP8 cache", partial(error, dtype="fp8"), large=True)


def prefill_error(
    bench: Bench,
    *,
    shape: AttentionShape,
    query_lens: list[int],
    lengths: list[int],
    block_size: int,
    dtype: KVDtype | None = None,
) -> float:
    context = new_context(bench, shape, lengths, block_size, dtype)
    fill(bench, context, shape)
    query = bench.normal(sum(query_lens), shape.num_heads, shape.head_dim)
    segment = segment_of(AttentionPhase.PREFILL, query_lens, lengths, context.tables)
    heads = Heads(query, None, None)
    if segment.fresh:
        index = torch.cat(context.index)
        keys, values = (
            rows_of(array[shape.layer], index, block_size).to(query.dtype)
            for array in (context.storage.keys, context.storage.values)
        )
        heads = Heads(query, keys, values)
    result = bench.kernels.attend(heads, shape, (segment,), context.storage)
    return relative_error(result, expected_attention(bench, query, shape, context, query_lens))


# -- the cache --------------------------------------------------------------------------------------------------------
def cache_checks() -> Iterator[Check]:
    for dim, rotated, interleaved, normed in (
        (64, 64, False, False),
        (80, 80, False, True),
        (96, 96, True, False),
        (128, 64, False, True),
        (64, 0, False, False),
        (256, 256, False, True),
    ):
        name = f"rope {dim} rotated {rotated}{' interleaved' * interleaved}{' normed' * normed}"
        error = partial(rope_error, dim=dim, rotated=rotated, interleaved=interleaved, normed=normed)
        if dim < 256:
            yield Check(f"{name}, 5 tokens", partial(error, tokens=5))
        yield Check(f"{name}, 300 tokens", partial(error, tokens=300), large=True)
    yield Check("copy blocks", copy_error)


def rope_error(bench: Bench, *, dim: int, rotated: int, interleaved: bool, normed: bool, tokens: int) -> float:
    norms = [Norm(bench.normal(dim, dtype=torch.float32), None, 1e-6) for _ in range(2)] if normed else [None, None]
    shape = AttentionShape(0, 6, 2, dim, 1.0, None, interleaved, *norms)
    angles = bench.normal(tokens, max(rotated // 2, 1), scale=3.0, dtype=torch.float32)
    rotation = Rotation(angles.cos(), angles.sin()) if rotated else None
    qkv = bench.normal(tokens, 10 * dim)
    contexts = [new_context(bench, shape, [tokens], 16) for _ in range(2)]
    index = contexts[0].index[0]
    batch = Batch(index, index, index, (), None)
    ours = bench.kernels.rope_and_write(qkv, shape, rotation, batch, contexts[0].storage)
    theirs = bench.reference.rope_and_write(qkv.float(), shape, rotation, batch, contexts[1].storage)
    pairs = [(ours.query, theirs.query), (ours.key, theirs.key), (ours.value, theirs.value)]
    for a, b in zip(*((c.storage.keys[0], c.storage.values[0]) for c in contexts), strict=True):
        pairs.append((a[index // 16, :, index % 16], b[index // 16, :, index % 16]))
    return max(relative_error(a, b) for a, b in pairs)


def copy_error(bench: Bench) -> float:
    cache = bench.normal(6, 9, 2, 4, 24)
    expected = cache.clone()
    expected[:, [3, 4, 7]] = cache[:, [1, 1, 8]]
    copy_blocks(cache, bench.integers([[1, 3], [1, 4], [8, 7]]))
    return relative_error(cache, expected)
