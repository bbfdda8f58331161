"""Attention segments whose queries see the whole context, as the tokens of an image do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from attention_cases import PREFILL, shape_of
from case_table import activations, new_context, normal, segment_over

from bifolio.kernels.interface import AttentionShape, Heads
from bifolio.kernels.native import NativeKernels
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.select import torch_kernels

SETS = {"reference": ReferenceKernels, "native": NativeKernels, "torch": lambda: torch_kernels("cpu", "f32")}


def by_hand(query: np.ndarray, keys: np.ndarray, values: np.ndarray, shape: AttentionShape) -> np.ndarray:
    """Softmax over every key that the window of a query does not hide, head by head."""
    group, start = shape.num_heads // shape.num_kv_heads, len(keys) - len(query)
    out = np.zeros((len(query), shape.num_heads, shape.head_dim))
    for number, rows in enumerate(query.astype(np.float64)):
        first = 0 if shape.window is None else max(0, start + number + 1 - shape.window)
        growth = 1 + shape.temperature * np.log(1 + (start + number) // shape.temperature_period)
        for head in range(shape.num_heads):
            own = keys[first:, head // group].astype(np.float64) @ rows[head] * shape.scale * growth
            own = np.tanh(own / shape.softcap) * shape.softcap if shape.softcap else own
            weights = np.exp(own - own.max())
            out[number, head] = weights @ values[first:, head // group] / weights.sum()
    return out.reshape(len(query), -1)


@pytest.mark.parametrize("name", ["grouped", "odd", "window", "soft-capped", "growing", "large"])
@pytest.mark.parametrize("kind", SETS)
def test_queries_see_the_whole_context(kind: str, name: str) -> None:
    """Behind a cached prefix, and over fresh keys and values with and without a cache."""
    kernels, rng, shape = SETS[kind](), np.random.default_rng(3), shape_of(name)
    lengths, queries = [33, 300, 5], [20, 30, 5]
    context = new_context(kernels, rng, lengths, shape.num_kv_heads, shape.head_dim)
    query = normal(rng, sum(queries), shape.num_heads, shape.head_dim)
    segment = replace(segment_over(kernels, PREFILL, queries, lengths, context.tables), causal=False)
    found = kernels.to_host(
        kernels.attend(Heads(activations(kernels, query), None, None), shape, (segment,), context.storage)
    )
    ends = np.cumsum(queries)
    for number, (length, count, end) in enumerate(zip(lengths, queries, ends, strict=True)):
        table = context.tables[number]
        keys, values = (
            np.asarray(kernels.to_host(part)) for part in context.storage.gather(1, kernels.from_host(table), length)
        )
        expected = by_hand(query[end - count : end], keys, values, shape)
        np.testing.assert_allclose(found[end - count : end], expected, rtol=2e-4, atol=2e-5)

    sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    heads = Heads(*(activations(kernels, normal(rng, 50, n, shape.head_dim)) for n in sizes))
    fresh = replace(segment_over(kernels, PREFILL, [17, 33], [17, 33], None), causal=False)
    alone = kernels.to_host(kernels.attend(heads, shape, (fresh,), None))
    parts = [np.asarray(kernels.to_host(part)) for part in heads]
    for start, end in ((0, 17), (17, 50)):
        expected = by_hand(*(part[start:end] for part in parts), shape)
        np.testing.assert_allclose(alone[start:end], expected, rtol=2e-4, atol=2e-5)


def test_a_text_and_an_image_of_one_sequence_share_a_pass() -> None:
    """Segments of one sequence follow each other: each reads the keys of those before it."""
    shape = shape_of("grouped")
    results = []
    for make in SETS.values():
        kernels = make()
        own = np.random.default_rng(7)
        context = new_context(kernels, own, [40], shape.num_kv_heads, shape.head_dim)
        query = activations(kernels, normal(np.random.default_rng(8), 40, shape.num_heads, shape.head_dim))
        segments = tuple(
            replace(
                segment_over(kernels, PREFILL, [count], [end], context.tables, end - count), causal=causal, fresh=False
            )
            for count, end, causal in ((10, 10, True), (20, 30, False), (10, 40, True))
        )
        found = kernels.to_host(kernels.attend(Heads(query, None, None), shape, segments, context.storage))
        results.append(found)
    np.testing.assert_allclose(results[1], results[0], rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(results[2], results[0], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("kind", SETS)
def test_a_layer_may_see_earlier_tokens_alone(kind: str) -> None:
    """In a segment that is not causal, with and without a cache: as in one that is."""
    kernels, rng, shape = SETS[kind](), np.random.default_rng(5), shape_of("grouped")
    earlier = replace(shape, causal=True)
    context = new_context(kernels, rng, [40, 7], shape.num_kv_heads, shape.head_dim)
    cached = segment_over(kernels, PREFILL, [20, 7], [40, 7], context.tables)
    fresh = segment_over(kernels, PREFILL, [17, 10], [17, 10], None)
    sizes = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    heads = Heads(*(activations(kernels, normal(rng, 27, n, shape.head_dim)) for n in sizes))
    for own, segment, storage in (
        (Heads(heads.query, None, None), cached, context.storage),
        (heads, fresh, None),
    ):
        expected = kernels.to_host(kernels.attend(own, shape, (segment,), storage))
        whole = replace(segment, causal=False)
        np.testing.assert_array_equal(kernels.to_host(kernels.attend(own, earlier, (whole,), storage)), expected)
        assert not np.array_equal(kernels.to_host(kernels.attend(own, shape, (whole,), storage)), expected)
