"""Paged attention on every instruction set: against the reference, and bit for bit under any cut of the work."""

from __future__ import annotations

import numpy as np
import pytest
from native_support import filled_storage, isas, segment, settings

from bifolio.kernels import native
from bifolio.kernels.interface import AttentionShape, Batch, Heads, Norm, Rotation
from bifolio.kernels.reference import ReferenceKernels

ISAS = isas()
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def shape_of(heads: int, kv_heads: int, dim: int, window: int | None = None) -> AttentionShape:
    return AttentionShape(0, heads, kv_heads, dim, 1 / np.sqrt(dim), window)


def attend(kernels: object, query: np.ndarray, shape: AttentionShape, segments: tuple, storage: object) -> np.ndarray:
    return kernels.attend(Heads(query, None, None), shape, segments, storage)  # type: ignore[attr-defined]


def assert_close(result: np.ndarray, expected: np.ndarray, isa: str, dtype: str) -> None:
    if isa == "amx" and dtype == "bf16":  # its tiles round queries and weights to bfloat16, too
        assert np.abs(result - expected).max() < 0.02
        assert np.sqrt(np.mean((result - expected) ** 2)) < 0.002
    else:
        np.testing.assert_allclose(result, expected, **TOLERANCE)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(3, 3, 16, None), (8, 2, 64, None), (7, 1, 80, 100), (4, 4, 128, 33), (2, 1, 256, None), (6, 2, 36, 257)],
)
def test_equals_the_reference(isa: str, dtype: str, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    rng = np.random.default_rng(dim)
    contexts, queries = [1, 16, 17, 31, 300, 700], [1, 1, 2, 31, 5, 1]
    storage, tables = filled_storage(rng, contexts, kv_heads, dim, dtype, 16)
    query = rng.standard_normal((sum(queries), heads, dim), np.float32)
    segments = (segment(queries, contexts, tables),)
    shape = shape_of(heads, kv_heads, dim, window)
    with settings(isa):
        result = attend(native.NativeKernels(), query, shape, segments, storage)
    assert_close(result, attend(ReferenceKernels(), query, shape, segments, storage), isa, dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("context", [1, 2, 31, 32, 33, 63, 255, 256, 257, 511, 513, 1025, 5000])
def test_decode_over_any_context(isa: str, context: int) -> None:
    rng = np.random.default_rng(context)
    storage, tables = filled_storage(rng, [context], 2, 32, "f16", 16)
    query = rng.standard_normal((1, 6, 32), np.float32)
    segments = (segment([1], [context], tables),)
    shape = shape_of(6, 2, 32)
    with settings(isa):
        result = attend(native.NativeKernels(), query, shape, segments, storage)
    np.testing.assert_allclose(result, attend(ReferenceKernels(), query, shape, segments, storage), **TOLERANCE)


@pytest.mark.sampled(3)
@pytest.mark.full
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("window", [None, 70])
def test_chunks_threads_and_blocks_do_not_change_a_bit(isa: str, dtype: str, window: int | None) -> None:
    """A query's output is the same alone, in a chunk, in a whole prompt, with other block sizes and thread counts."""
    length, heads, kv_heads, dim = 530, 6, 2, 32 if dtype == "q8_0" else 48
    outputs = []
    query = np.random.default_rng(3).standard_normal((length, heads, dim), np.float32)
    shape = shape_of(heads, kv_heads, dim, window)
    for block_size, threads, chunk in ((16, 1, length), (16, 2, 97), (8, 3, 1), (64, 2, 200), (5, 2, 31)):
        rng = np.random.default_rng(4)
        storage, tables = filled_storage(rng, [length], kv_heads, dim, dtype, block_size)
        if block_size != 16:  # the same numbers in other blocks
            storage = refill(storage, tables, dtype, block_size, length, kv_heads, dim)
        positions = range(length - 40, length) if chunk == 1 else range(0, length, chunk)
        with settings(isa, threads):
            kernels = native.NativeKernels()
            parts = []
            for start in positions:
                stop = min(start + chunk, length)
                parts.append(
                    attend(kernels, query[start:stop], shape, (segment([stop - start], [stop], tables),), storage)
                )
        outputs.append(np.concatenate(parts))
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0][length - len(output) :])


def refill(storage, tables, dtype, block_size, length, kv_heads, dim):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(4)
    source, source_tables = filled_storage(rng, [length], kv_heads, dim, dtype, 16)
    keys, values = source.gather(0, source_tables[0], length)
    positions = np.arange(length)
    slots = tables[0, positions // block_size].astype(np.int64) * block_size + positions % block_size
    storage.write(0, slots, keys, values)
    return storage


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("heads", "dim", "window"), [(2, 32, None), (6, 64, None), (14, 128, 90)])
def test_q8_cache_is_close_to_its_numbers(isa: str, heads: int, dim: int, window: int | None) -> None:
    """The reference attends to the same bytes with exact queries and weights; ours rounds both to 8 bits."""
    rng = np.random.default_rng(dim)
    contexts, queries = [1, 33, 300, 40], [1, 2, 1, 40]
    storage, tables = filled_storage(rng, contexts, 2, dim, "q8_0", 16)
    query = rng.standard_normal((sum(queries), heads, dim), np.float32)
    segments = (segment(queries, contexts, tables),)
    shape = shape_of(heads, 2, dim, window)
    with settings(isa):
        result = attend(native.NativeKernels(), query, shape, segments, storage)
    expected = attend(ReferenceKernels(), query, shape, segments, storage)
    assert np.abs(result - expected).max() < 0.03
    assert np.sqrt(np.mean((result - expected) ** 2)) < 0.005


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_instruction_sets_agree_bit_for_bit(dtype: str) -> None:
    """AMX attends to a bf16 cache in bfloat16."""
    isas_to_compare = [isa for isa in ISAS if (isa, dtype) != ("amx", "bf16")]
    rng = np.random.default_rng(21)
    contexts, queries = [700, 70, 5], [1, 70, 3]
    storage, tables = filled_storage(rng, contexts, 2, 64, dtype, 32)
    query = rng.standard_normal((sum(queries), 6, 64), np.float32)
    results = []
    for isa in isas_to_compare:
        with settings(isa):
            kernels = native.NativeKernels()
            results.append(attend(kernels, query, shape_of(6, 2, 64), (segment(queries, contexts, tables),), storage))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_reading_a_poisoned_block_shows(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(22)
    storage, tables = filled_storage(rng, [64], 1, 32, dtype, 16)
    storage.poison_blocks([int(tables[0, 1])])
    query = rng.standard_normal((1, 3, 32), np.float32)
    with settings(isa):
        result = attend(native.NativeKernels(), query, shape_of(3, 1, 32), (segment([1], [64], tables),), storage)
    assert np.isnan(result).any()


@pytest.mark.parametrize("isa", ISAS)
def test_shared_prefix_read_once_gives_the_same_bits(isa: str) -> None:
    rng = np.random.default_rng(11)
    heads, kv_heads, dim, block_size = 4, 2, 32, 16
    storage, tables = filled_storage(rng, [900] * 3, kv_heads, dim, "f16", block_size)
    tables[:, :40] = tables[0, :40]  # 640 tokens in common
    contexts = [900, 700, 655]
    query = rng.standard_normal((3, heads, dim), np.float32)
    shape = shape_of(heads, kv_heads, dim)
    with settings(isa):
        apart, together = (
            attend(
                native.NativeKernels(share_prefixes=share),
                query,
                shape,
                (segment([1] * 3, contexts, tables),),
                storage,
            )
            for share in (False, True)
        )
    np.testing.assert_array_equal(together, apart)


@pytest.mark.full
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_several_segments_and_drafts(isa: str, dtype: str) -> None:
    """Decode with drafts and a prefill chunk in one batch equal each sequence alone."""
    rng = np.random.default_rng(12)
    contexts, queries = [290, 12, 400], [3, 1, 120]
    storage, tables = filled_storage(rng, contexts, 1, 64, dtype, 32)
    query = rng.standard_normal((sum(queries), 7, 64), np.float32)
    shape = shape_of(7, 1, 64)
    segments = (
        segment(queries[:2], contexts[:2], tables[:2].copy()),
        segment(queries[2:], contexts[2:], tables[2:].copy(), start=4),
    )
    with settings(isa, 2):
        kernels = native.NativeKernels()
        result = attend(kernels, query, shape, segments, storage)
        start = 0
        for i, count in enumerate(queries):
            one = (segment([count], contexts[i : i + 1], tables[i : i + 1].copy()),)
            alone = attend(kernels, query[start : start + count], shape, one, storage)
            np.testing.assert_array_equal(result[start : start + count], alone)
            start += count
    assert_close(result, attend(ReferenceKernels(), query, shape, segments, storage), isa, dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_rope_and_write(isa: str, interleaved: bool, normed: bool, dtype: str) -> None:
    rng = np.random.default_rng(13)
    heads, kv_heads, dim, tokens = 4, 2, 64 if dtype == "q8_0" else 48, 21
    norm = Norm(rng.standard_normal(dim).astype(np.float32), None, 1e-6) if normed else None
    shape = AttentionShape(0, heads, kv_heads, dim, 0.1, None, interleaved, norm, norm)
    qkv = rng.standard_normal((tokens, (heads + 2 * kv_heads) * dim), np.float32)
    angles = rng.standard_normal((tokens, dim // 4)).astype(np.float32)  # half of the head is rotated
    rotation = Rotation(np.cos(angles), np.sin(angles))
    slots = np.arange(16, 16 + tokens, dtype=np.int64)
    batch = Batch(np.zeros(tokens, np.int32), np.zeros(tokens, np.int32), slots, (), None)
    caches = []
    heads_out = []
    for kernels in (native.NativeKernels(), ReferenceKernels()):
        storage, _ = filled_storage(np.random.default_rng(0), [32], kv_heads, dim, dtype, 16)
        with settings(isa):
            heads_out.append(kernels.rope_and_write(qkv, shape, rotation, batch, storage))
        caches.append(storage.gather(0, [1, 2], 32))
    for native_part, reference_part in zip(heads_out[0], heads_out[1], strict=True):
        np.testing.assert_allclose(native_part, reference_part, rtol=1e-5, atol=1e-6)
    for native_part, reference_part in zip(caches[0], caches[1], strict=True):
        relative, absolute = {"f32": (1e-5, 1e-6), "f16": (1e-3, 1e-6), "bf16": (8e-3, 1e-6), "q8_0": (0, 0.04)}[dtype]
        np.testing.assert_allclose(native_part, reference_part, rtol=relative, atol=absolute)


def test_without_a_cache_the_batch_attends_to_itself() -> None:
    rng = np.random.default_rng(14)
    queries = [5, 1, 130]
    heads = Heads(*(rng.standard_normal((136, n, 32), np.float32) for n in (6, 2, 2)))
    plain = segment(queries, queries, None)
    shape = shape_of(6, 2, 32)
    result = native.NativeKernels().attend(heads, shape, (plain,), None)
    np.testing.assert_allclose(result, ReferenceKernels().attend(heads, shape, (plain,), None), **TOLERANCE)


def test_wrong_block_tables_are_refused() -> None:
    rng = np.random.default_rng(15)
    storage, tables = filled_storage(rng, [40], 1, 16, "f32", 16)
    query = rng.standard_normal((1, 1, 16), np.float32)
    kernels = native.NativeKernels()
    for bad, context, message in ((tables + 100, 40, "does not exist"), (tables, 500, "does not fit")):
        with pytest.raises(ValueError, match=message):
            attend(kernels, query, shape_of(1, 1, 16), (segment([1], [context], bad.astype(np.int32)),), storage)
