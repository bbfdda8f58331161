"""Scores of an indexer and the positions that they choose, in Triton's interpreter: against torch and numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from case_table import Context, activations, new_context, normal

from bifolio.kernels.host_choice import largest
from bifolio.kernels.interface import AttentionShape, KernelSet
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton import top_positions as top
from bifolio.kernels.triton.index_scores import index_scores
from bifolio.kernels.triton.pass_rows import PassRows

LENGTH = 75


def last_queries(context: Context, sequence: int, count: int, length: int = LENGTH) -> PassRows:
    """The last queries of a sequence."""
    seen = np.arange(length - count + 1, length + 1)
    owners = torch.full((count,), sequence, dtype=torch.int32)
    return PassRows(torch.from_numpy(seen.astype(np.int32)), torch.from_numpy(context.tables), owners, seen, length)


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("heads", "dim", "count", "block_size"), [(4, 32, 3, 16), (17, 24, 2, 4), (1, 16, 1, 64)])
def test_scores_are_those_of_torch(dtype: str, heads: int, dim: int, count: int, block_size: int) -> None:
    kernels: KernelSet = TritonKernels("cpu", dtype)
    rng = np.random.default_rng(0)
    context = new_context(kernels, rng, [20, LENGTH], 1, dim, block_size, shared_values=True)
    shape = AttentionShape(1, heads, 1, dim, 0.3, top_k=8)
    query = activations(kernels, normal(rng, count, heads + 2, dim))[:, :heads]  # rows lie apart
    weights = activations(kernels, normal(rng, count, heads))
    rows = last_queries(context, 1, count)
    found = index_scores(query, weights, shape, context.storage, rows, (0, count, LENGTH), num_processors=1)
    keys = context.storage.gather(1, context.tables[1].tolist(), LENGTH)[0][:, 0]
    scores = torch.relu(query.float() @ keys.float().T * shape.scale)
    expected = torch.einsum("nh,nhl->nl", weights.float(), scores)
    for row in range(count):
        seen = LENGTH - count + 1 + row
        torch.testing.assert_close(found[row, :seen], expected[row, :seen], rtol=1e-4, atol=1e-4)
        part = row, row + 1, seen
        alone = index_scores(query, weights, shape, context.storage, rows, part, num_processors=8)
        assert torch.equal(alone[0], found[row, :seen])


def test_a_nan_is_the_least_score() -> None:
    kernels: KernelSet = TritonKernels("cpu", "f32")
    rng = np.random.default_rng(1)
    context = new_context(kernels, rng, [LENGTH], 1, 16, shared_values=True)
    shape = AttentionShape(1, 2, 1, 16, 0.3, top_k=8)
    place = int(context.index[40])
    context.storage.keys[1][place // 16, 0, place % 16] = torch.nan
    query, weights = torch.from_numpy(normal(rng, 1, 2, 16)), torch.ones((1, 2))
    rows = last_queries(context, 0, 1)
    found = index_scores(query, weights, shape, context.storage, rows, (0, 1, LENGTH), num_processors=1)[0]
    assert found.isinf().nonzero().flatten().tolist() == [40]
    assert not found.isnan().any()


def ranked_rows(rng: np.random.Generator, width: int) -> list[np.ndarray]:
    """Scores with and without ties, zeros of both signs, and excluded positions."""
    few = rng.integers(-2, 3, width).astype(np.float32)
    signed = np.where(rng.random(width) < 0.5, np.float32(-0.0), np.float32(0.0))
    excluded = rng.standard_normal(width).astype(np.float32)
    excluded[rng.permutation(width)[: width - 3]] = -np.inf
    wide = (rng.standard_normal(width) * 10.0 ** rng.integers(-30, 30, width)).astype(np.float32)
    return [rng.standard_normal(width).astype(np.float32), few, signed, excluded, wide, np.zeros(width, np.float32)]


@pytest.mark.parametrize("top_k", [1, 5, 64])
@pytest.mark.parametrize("width", [66, 200])
def test_positions_are_those_of_the_definition(top_k: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows shorter and longer than a block; rows that see too little keep their choice."""
    monkeypatch.setattr(top, "BLOCK", 64)
    scores = ranked_rows(np.random.default_rng(width + top_k), width)
    seen = np.array([width, width - 1, width, width, width, top_k])
    none = torch.zeros((1, 1), dtype=torch.int32)
    rows = PassRows(torch.from_numpy(seen.astype(np.int32)), none, none[0], seen, width)
    found = torch.full((len(scores), top_k), -1, dtype=torch.int32)
    top.top_positions(torch.from_numpy(np.stack(scores)), rows, found)
    for row, end in enumerate(seen[:-1]):
        assert found[row].tolist() == largest(scores[row][:end], top_k).tolist()
    assert (found[-1] == -1).all()
