"""Attention over large latents in Triton's interpreter: pieces of contexts, and the same bits in both phases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from attention_checks import shape_of
from check_bench import Bench, expected_attention, relative_error, segment_of
from latent_checks import DECODE, PREFILL, latents

sys.path.insert(0, str(Path(__file__).parent.parent / "model"))

from test_chosen_positions import texts

from bifolio.kernels.interface import Heads
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import TritonKernels, latent_attention
from bifolio.kernels.triton.step.decodes import StepKey

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


@pytest.mark.parametrize("name", ["glm4_moe_lite", "youtu"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_engines_run_captured_steps(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small latents of a test as if they were large: decodes, prompts beside them, and a cached prefix."""
    launched: list[int] = []
    launch = latent_attention._launch
    monkeypatch.setattr(latent_attention, "_launch", lambda *own, **more: (launched.append(1), launch(*own, **more)))
    _, expected = texts(name, TorchKernels("cpu"), 3)
    assert not launched
    monkeypatch.setattr(latent_attention, "LARGE_HEAD", 8)
    engine, found = texts(name, TritonKernels("cpu", "f32", deterministic=deterministic), 3)
    assert launched
    assert engine.slots.device is not None
    assert engine.slots.device.prompts is not None
    assert engine.slots.device.graphs.keys(StepKey)
    assert found == expected
