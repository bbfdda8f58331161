"""Attention over large latents in Triton's interpreter: pieces of contexts, and the same bits in both phases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_checks import shape_of
from check_bench import Bench, expected_attention, relative_error, segment_of
from latent_checks import DECODE, PREFILL, latents

from bifolio.kernels.interface import Heads
from bifolio.kernels.triton import TritonKernels, latent_attention

LENGTHS, DIM = [200, 3, 65], 272


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "FIXED_PIECE", 64)
    monkeypatch.setattr(latent_attention, "LEAST_PIECE", 16)


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_pieces_of_prompts(dtype: str, block_size: int) -> None:
    bench = Bench(TritonKernels("cpu", dtype))
    bench.kernels.attention._num_processors = 64
    shape = shape_of(5, 1, DIM)
    context = latents(bench, shape, LENGTHS, block_size, None)
    for counts in ([4, 1, 17], [1, 1, 1]):
        query = bench.normal(sum(counts), 5, DIM)
        segment = segment_of(PREFILL, counts, LENGTHS, context.tables)
        found = bench.kernels.attend(Heads(query, None, None), shape, (segment,), context.storage)
        limit = 2e-5 if dtype == "f32" else 2e-3
        assert relative_error(found, expected_attention(bench, query, shape, context, counts)) < limit


@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_bits_of_both_phases(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt in one chunk or in two, and of decodes together and alone."""
    bench = Bench(TritonKernels("cpu", dtype, deterministic=True))
    shape = shape_of(5, 1, DIM)
    context = latents(bench, shape, LENGTHS, 16, None)
    query = bench.normal(70, 5, DIM)

    def attend(phase: object, counts: list[int], lengths: list[int], rows: slice, first: int = 0) -> torch.Tensor:
        segment = segment_of(phase, counts, lengths, context.tables[first : first + len(counts)])  # type: ignore[arg-type]
        found: torch.Tensor = bench.kernels.attend(Heads(query[rows], None, None), shape, (segment,), context.storage)
        return found

    whole = attend(PREFILL, [70], [200], slice(0, 70))
    parts = attend(PREFILL, [33], [163], slice(0, 33)), attend(PREFILL, [37], [200], slice(33, 70))
    assert torch.equal(whole, torch.cat(parts))
    for row in (0, 1, 69):
        for most in (1 << 26, 1):
            monkeypatch.setattr(latent_attention, "MOST_PARTS", most)
            assert torch.equal(attend(DECODE, [1], [131 + row], slice(row, row + 1))[0], whole[row])
    together = attend(DECODE, [1, 1, 1], LENGTHS, slice(0, 3))
    alone = [attend(DECODE, [1], [LENGTHS[row]], slice(row, row + 1), row) for row in range(3)]
    assert torch.equal(together, torch.cat(alone))
    lengths = np.array(LENGTHS)
    assert (lengths > 64).sum() == 2
