"""Attention in parts, in Triton's interpreter: gather, division into parts and merge, with torch in cuDNN's place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent))

from attention_checks import shape_of
from check_bench import Bench, expected_attention, fill, new_context, relative_error, segment_of

from bifolio.kernels.interface import AttentionPhase
from bifolio.kernels.triton import TritonKernels, long_attention
from bifolio.kernels.triton.long_attention import LongQueries, Part, lengths_of, long_queries, parts_of


def attend_part(query: Any, keys: Any, values: Any, scale: float, *, is_causal: bool) -> Part:
    """The definition: the causal mask starts at the first key."""
    query, keys, values = (x.transpose(0, 1).double() for x in (query, keys, values))
    group = len(query) // len(keys)
    scores = query @ keys.repeat_interleave(group, 0).transpose(1, 2) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    out = torch.softmax(scores, -1) @ values.repeat_interleave(group, 0)
    layout = out.float().transpose(0, 1).contiguous().transpose(0, 1)  # cuDNN's: [n, heads, dim] in memory
    return Part(layout.unsqueeze(0), torch.logsumexp(scores, -1).float()[None, :, :, None])


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_attention, "attend_part", attend_part)
    for name, value in (("STEP", 8), ("QUERY_LENGTHS", (32, 16, 8)), ("KEY_LENGTHS", (32, 8))):
        monkeypatch.setattr(long_attention, name, value)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("count", "context"),
    [(8, 8), (1, 1), (5, 5), (3, 10), (17, 60), (40, 41), (24, 72), (9, 300)],  # the last one has more than 8 parts
)
@pytest.mark.parametrize("dim", [16, 24])
@pytest.mark.usefixtures("short_parts")
def test_parts_give_the_attention_of_the_whole_context(count: int, context: int, dim: int) -> None:
    bench, shape = Bench(TritonKernels("cpu", "f32"), count), shape_of(4, 2, dim)
    lengths, counts = [11, context], [2, count]
    cached = new_context(bench, shape, lengths, 4)
    fill(bench, cached, shape)
    query = bench.normal(sum(counts), 4, dim)
    expected = expected_attention(bench, query, shape, cached, counts)
    out = torch.full((sum(counts), 4 * dim), torch.nan)
    item = LongQueries(1, 2, count, context)
    long_attention.long_attention(query, shape, cached.storage, bench.integers(cached.tables)[1], item, out)
    assert torch.isnan(out[:2]).all()  # rows of the other sequence are not written
    assert relative_error(out[2:], expected[2:].reshape(count, -1)) < 1e-5


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 200), st.integers(0, 2))
def test_parts_cover_every_key_before_a_piece_once(tiles: int, size: int) -> None:
    length, first = long_attention.QUERY_LENGTHS[size], tiles * long_attention.STEP
    parts = list(parts_of(first, length))
    assert [begin for begin, _ in parts[1:]] == [end for _, end in parts[:-1]]
    assert parts[0][0] == 0
    assert parts[-1] == (first, first + length)
    assert all(end - begin in long_attention.KEY_LENGTHS for begin, end in parts[:-1])


def test_lengths_add_up() -> None:
    for tiles in range(40):
        total = tiles * long_attention.STEP
        assert sum(lengths_of(total, long_attention.QUERY_LENGTHS)) == total


def test_long_sequences_are_those_with_much_work_and_little_padding() -> None:
    tables = np.zeros((5, 1000), dtype=np.int32)
    counts, contexts = [8192, 100, 3000, 1200, 700], [16384, 50_000, 3000, 9000, 700]
    segment = segment_of(AttentionPhase.PREFILL, counts, contexts, tables)
    assert [item.sequence for item in long_queries(segment, None)] == [0, 2]
    assert [item.sequence for item in long_queries(segment, 4096)] == [2]
