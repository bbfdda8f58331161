"""Positions chosen by native indexers, and attention to them: the rule of the choice, and bit for bit under any cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from native_support import isas, segment, settings

from bifolio.kernels import native
from bifolio.kernels.interface import AttentionPhase, AttentionShape, Heads
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.storage import CacheLayout, KVStorage

ISAS = isas()
DTYPES = ["f32", "f16", "bf16", "q8_0"]
LENGTH, TOP_K = 600, 40
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}


def filled(keys: Sequence[np.ndarray], dtype: str = "f32", block_size: int = 16) -> tuple[KVStorage, np.ndarray]:
    """A cache of these keys [length, dim], which are the values; all other slots are NaN."""
    blocks, dim = [-(-len(own) // block_size) for own in keys], keys[0].shape[-1]
    layout = CacheLayout(1, 1 + sum(blocks), block_size, 1, dim, dtype, True, shared_values=True)  # type: ignore[arg-type]
    storage, tables = KVStorage(layout), np.zeros((len(keys), max(blocks)), np.int32)
    order = np.random.default_rng(5).permutation(np.arange(1, 1 + sum(blocks), dtype=np.int32))
    for i, own in enumerate(keys):
        tables[i, : blocks[i]] = order[sum(blocks[:i]) :][: blocks[i]]
        positions = np.arange(len(own))
        slots = tables[i, positions // block_size].astype(np.int64) * block_size + positions % block_size
        storage.write(0, slots, own[:, None], own[:, None])
    return storage, tables


def shape_of(heads: int, dim: int, top_k: int = TOP_K) -> AttentionShape:
    return AttentionShape(0, heads, 1, dim, 1 / np.sqrt(dim), top_k=top_k)


def only(query: np.ndarray) -> Heads:
    return Heads(query, None, None)


def chosen_of(scores: np.ndarray, top_k: int) -> np.ndarray:
    """By the rule: the largest of each row's leading scores, of equal ones the first, ascending; NaN is the least."""
    found = np.full((len(scores), top_k), -1, np.int32)
    for row, own in enumerate(scores):
        seen = np.nan_to_num(own[: row + 1], nan=-np.inf, posinf=np.inf, neginf=-np.inf)
        if len(seen) > top_k:
            found[row] = np.sort(np.argsort(-seen, kind="stable")[:top_k])
    return found


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chosen_positions_are_those_of_the_reference(isa: str, dtype: str) -> None:
    """Where no two scores are almost equal; a q8_0 cache rounds queries, too, so that few positions differ."""
    rng = np.random.default_rng(0)
    storage, tables = filled([rng.standard_normal((n, 64), np.float32) for n in (LENGTH, 37, 90)], dtype)
    queries, lengths = [30, 37, 1], [LENGTH, 37, 90]
    query = rng.standard_normal((sum(queries), 5, 64), np.float32)
    weights = rng.standard_normal((sum(queries), 5), np.float32)
    arguments = only(query), weights, shape_of(5, 64), (segment(queries, lengths, tables),), storage
    with settings(isa):
        found = native.NativeKernels().choose(*arguments)
    expected = ReferenceKernels().choose(*arguments)
    assert found.dtype == np.int32
    assert (found[30:67] == -1).all()
    shared = [len(np.intersect1d(a, b)) for a, b in zip(found, expected, strict=True)]
    assert np.mean(shared) / np.mean([len(np.unique(row)) for row in expected]) > (0.97 if dtype == "q8_0" else 0.9999)


@pytest.mark.parametrize("isa", ISAS)
def test_of_equal_scores_the_first_are_chosen(isa: str) -> None:
    """Scores of small whole numbers are exact: many are equal, many are zeros, and weights of both signs make -0."""
    rng = np.random.default_rng(1)
    keys = rng.integers(-1, 2, (LENGTH, 4)).astype(np.float32)
    query = rng.integers(-1, 2, (LENGTH, 3, 4)).astype(np.float32)
    weights = rng.integers(-2, 3, (LENGTH, 3)).astype(np.float32)
    storage, tables = filled([keys])
    shape = replace(shape_of(3, 4), scale=1.0)
    with settings(isa):
        found = native.NativeKernels().choose(
            only(query), weights, shape, (segment([LENGTH], [LENGTH], tables),), storage
        )
    scores = np.einsum("th,thl->tl", weights, np.maximum(query @ keys.T, 0))
    np.testing.assert_array_equal(found, chosen_of(scores, TOP_K))


@pytest.mark.parametrize("isa", ISAS)
def test_scores_of_any_kind_are_ordered(isa: str) -> None:
    """One dimension and weight 1 or -1: scores are the keys, infinite ones, the smallest ones and NaN among them."""
    rng = np.random.default_rng(2)
    values = np.concatenate([
        rng.standard_normal(200), -rng.random(100), rng.standard_normal(60) * 1e-42, [np.inf, -np.inf, 0.0, -0.0] * 5,
        np.full(20, np.nan), rng.standard_normal(60) * 1e30,
    ]).astype(np.float32)  # fmt: skip
    keys = rng.permutation(values)[:, None]
    storage, tables = filled([keys])
    count = len(keys)
    for sign in (1.0, -1.0):
        query, weights = np.ones((count, 1, 1), np.float32), np.full((count, 1), sign, np.float32)
        for top_k in (1, 40, count - 1):
            shape = replace(shape_of(1, 1, top_k), scale=1.0)
            with settings(isa):
                found = native.NativeKernels().choose(
                    only(query), weights, shape, (segment([count], [count], tables),), storage
                )
            scores = np.tile(np.where(np.isnan(keys[:, 0]), np.nan, sign * np.maximum(keys[:, 0], 0)), (count, 1))
            np.testing.assert_array_equal(found, chosen_of(scores, top_k))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_chosen_positions_equals_that_to_a_cache_of_them(isa: str, dtype: str) -> None:
    """To the last bit: a cache that holds the chosen rows alone gives the same sums in the same order."""
    rng = np.random.default_rng(3)
    heads, dim, count = 7, 96, 300
    keys = rng.standard_normal((LENGTH, dim), np.float32)
    storage, tables = filled([keys], dtype)
    chosen = np.stack([np.sort(rng.permutation(LENGTH - 3)[:count]) for _ in range(3)]).astype(np.int32)
    query = rng.standard_normal((3, heads, dim), np.float32)
    shape = shape_of(heads, dim, count)
    with settings(isa):
        kernels = native.NativeKernels()
        found = kernels.attend_chosen(only(query), chosen, shape, (segment([3], [LENGTH], tables),), storage)
        for row in range(3):
            own, own_tables = filled([keys[chosen[row]]], dtype)
            part = (segment([1], [count], own_tables),)
            expected = kernels.attend(only(query[row : row + 1]), replace(shape, top_k=0), part, own)
            np.testing.assert_array_equal(found[row : row + 1], expected)
    if dtype != "q8_0" and not (isa == "amx" and dtype == "bf16"):
        expected = ReferenceKernels().attend_chosen(
            only(query), chosen, shape, (segment([3], [LENGTH], tables),), storage
        )
        np.testing.assert_allclose(found, expected, **TOLERANCE)


def computed(chunk: int, threads: int, block_size: int, dtype: str, beside: bool) -> tuple[np.ndarray, np.ndarray]:
    """The choices and the outputs of one sequence, computed in chunks, alone or between two others."""
    rng = np.random.default_rng(4)
    heads, dim = 3, 64
    keys = [rng.standard_normal((LENGTH, dim), np.float32) for _ in range(3)]
    query, weights = rng.standard_normal((LENGTH, heads, dim), np.float32), rng.standard_normal((LENGTH, heads))
    storage, tables = filled(keys, dtype, block_size)
    shape, parts = shape_of(heads, dim), []
    kernels = native.NativeKernels(threads)
    for start in range(0, LENGTH, chunk):
        stop = min(start + chunk, LENGTH)
        count = stop - start
        rows, kept = slice(start, stop), slice(0, count)
        batch = (segment([count], [stop], tables[:1], phase=AttentionPhase.PREFILL),)
        own, own_weights = query[rows], weights[rows].astype(np.float32)
        if beside:
            others = [5, count, 9]
            batch = (segment(others, [LENGTH, stop, 30], tables[[1, 0, 2]]),)
            own = np.concatenate([query[:5], own, query[5:14]])
            own_weights = np.concatenate([weights[:5], own_weights, weights[5:14]]).astype(np.float32)
            kept = slice(5, 5 + count)
        chosen = kernels.choose(only(own), own_weights, shape, batch, storage)
        mixed = kernels.attend_chosen(only(own), chosen, shape, batch, storage)
        parts.append((chosen[kept], mixed[kept]))
    return np.concatenate([each for each, _ in parts]), np.concatenate([each for _, each in parts])


@pytest.mark.full
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_chunks_threads_and_blocks_change_no_bit(isa: str, dtype: str) -> None:
    with settings(isa):
        chosen, mixed = computed(LENGTH, 1, 16, dtype, False)
        for cut in ((97, 2, 8, True), (200, 3, 64, False), (31, 2, 5, True)):
            again = computed(*cut[:3], dtype, cut[3])
            np.testing.assert_array_equal(again[0], chosen, str(cut))
            np.testing.assert_array_equal(again[1], mixed, str(cut))


@pytest.mark.parametrize("isa", ISAS)
def test_decodes_choose_as_prompts(isa: str) -> None:
    """One query of each sequence, in the plan of decodes, with several threads; sequences share their first blocks."""
    rng = np.random.default_rng(6)
    heads, dim, lengths = 4, 64, [LENGTH, 41, 40, 3, 300]
    storage, tables = filled([rng.standard_normal((LENGTH, dim), np.float32)])
    tables = np.repeat(tables, len(lengths), axis=0)
    query = rng.standard_normal((len(lengths), heads, dim), np.float32)
    weights = rng.standard_normal((len(lengths), heads), np.float32)
    shape, found = shape_of(heads, dim), []
    ones = [1] * len(lengths)
    with settings(isa):
        for threads, phase in ((1, AttentionPhase.PREFILL), (3, AttentionPhase.DECODE)):
            kernels = native.NativeKernels(threads, share_prefixes=threads > 1)
            batch = (segment(ones, lengths, tables, phase=phase),)
            chosen = kernels.choose(only(query), weights, shape, batch, storage)
            found.append((chosen, kernels.attend_chosen(only(query), chosen, shape, batch, storage)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert ((found[0][0][:, 0] == -1) == np.array([False, False, True, True, False])).all()
