"""Scores of an indexer, in Triton's interpreter: against torch, and the same whatever is computed with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from case_table import activations, new_context, normal

from bifolio.kernels.interface import AttentionShape, KernelSet
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton.index_scores import index_scores

LENGTH = 75


def expected_scores(
    query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, shape: AttentionShape, seen: int
) -> torch.Tensor:
    scores = torch.relu(query.float() @ keys.float().T * shape.scale)
    ranked = torch.einsum("nh,nhl->nl", weights.float(), scores)
    ends = torch.arange(seen, seen + len(query))
    return ranked.masked_fill(torch.arange(keys.shape[0]) >= ends[:, None], -torch.inf)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("heads", "dim", "count", "block_size"), [(4, 32, 3, 16), (17, 24, 2, 4), (1, 16, 1, 64)])
def test_scores_are_those_of_torch(dtype: str, heads: int, dim: int, count: int, block_size: int) -> None:
    kernels: KernelSet = TritonKernels("cpu", dtype)
    rng = np.random.default_rng(0)
    context = new_context(kernels, rng, [20, LENGTH], 1, dim, block_size, shared_values=True)
    shape = AttentionShape(1, heads, 1, dim, 0.3, top_k=8)
    query = activations(kernels, normal(rng, count, heads + 2, dim))[:, :heads]  # rows lie apart
    weights = activations(kernels, normal(rng, count, heads))
    table, seen = torch.from_numpy(context.tables[1]), LENGTH - count + 1
    found = index_scores(query, weights, shape, context.storage, table, seen)
    keys = context.storage.gather(1, context.tables[1].tolist(), LENGTH)[0][:, 0]
    expected = expected_scores(query, weights, keys, shape, seen)
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for row in range(count):
        alone = index_scores(query[row : row + 1], weights[row : row + 1], shape, context.storage, table, seen + row)
        assert torch.equal(alone[0], found[row, : seen + row])


def test_a_nan_is_the_least_score() -> None:
    kernels: KernelSet = TritonKernels("cpu", "f32")
    rng = np.random.default_rng(1)
    context = new_context(kernels, rng, [LENGTH], 1, 16, shared_values=True)
    shape, table = AttentionShape(1, 2, 1, 16, 0.3, top_k=8), torch.from_numpy(context.tables[0])
    place = int(context.index[40])
    context.storage.keys[1][place // 16, 0, place % 16] = torch.nan
    query, weights = torch.from_numpy(normal(rng, 1, 2, 16)), torch.ones((1, 2))
    found = index_scores(query, weights, shape, context.storage, table, LENGTH)[0]
    assert found.isinf().nonzero().flatten().tolist() == [40]
    assert not found.isnan().any()
