"""Captured steps with prompts, in the interpreter: they give the logits of steps that run kernel by kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent.parent))

from bifolio.engine.engine import InferenceEngine
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton.graphs.sizes import Sizes
from bifolio.kernels.triton.query_tiles import tiles_of
from bifolio.kernels.triton.scan_plan import LONG
from bifolio.kernels.triton.slots import TritonSlots
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.sampling_params import SamplingParams
from helpers import make_engine, random_prompt, tiny_model
from hybrid_models import tiny_hybrid

SIZES = Sizes((8, 24), 3)


def new_engine(architecture: str, *, deterministic: bool = False) -> tuple[InferenceEngine, TritonSlots]:
    kernels = TritonKernels("cpu", "f32", deterministic=deterministic)
    options = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 6, "token_budget": 24, "chunk_size": 9}
    engine = make_engine(load_folder(tiny_model(architecture)[1]), kernels=kernels, **options)
    assert isinstance(engine.slots.device, TritonSlots)
    return engine, engine.slots.device


def arrivals(engine: InferenceEngine, lengths: list[int], **options: Any) -> None:
    """Prompts of these lengths, one more after each step, so that prompts run beside decodes."""
    vocab = engine.model.config.vocab_size
    params = SamplingParams(max_tokens=3, ignore_eos=True, **options)
    for number, length in enumerate(lengths):
        engine.add_request(str(number), random_prompt(length, seed=number, vocab_size=vocab), params)
        engine.step()
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize(("architecture", "deterministic"), [("llama", False), ("llama", True), ("gemma3", False)])
def test_logits_equal_those_of_single_kernels(
    architecture: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks behind a context, whole prompts and decodes whose token is in flight; Gemma 3 has windows."""
    engine, device = new_engine(architecture, deterministic=deterministic)
    slots = engine.slots
    found: list[tuple[int, int]] = []

    def compared(plan: Any, batch: Any, given: Any) -> Any:
        assert given is None
        numbers = np.array([item.slot for item in plan.scheduled], dtype=np.int32)
        captured = device.prompt_logits(batch.on_host(), numbers) if plan.prefills else None
        if captured is not None:
            expected = engine.prefill_executor.run(slots.stage(plan, batch)).numpy()
            np.testing.assert_allclose(captured.numpy(), expected, atol=2e-4, rtol=1e-4)
            assert not deterministic or np.array_equal(captured.numpy(), expected)
            found.append((len(plan.decodes), sum(item.start > 0 for item in plan.prefills)))
        return captured

    monkeypatch.setattr(slots, "run_on_device", compared)
    arrivals(engine, [4, 13, 3], temperature=0.0)
    assert any(decodes for decodes, _ in found), "no step had decodes beside prompts"
    assert any(chunks for _, chunks in found), "no step had a chunk behind a context"


@pytest.mark.parametrize(
    ("kind", "deterministic"),
    [
        ("conv", False),
        ("delta", False),
        ("delta", True),
        pytest.param("keyed", False, marks=pytest.mark.slow),
        ("mamba", False),
        ("wide conv", False),
    ],
)
def test_logits_and_states_of_hybrids_equal_those_of_single_kernels(
    kind: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside short ones and decodes; checkpoints inside of prompts, and padding behind them."""
    kernels = TritonKernels("cpu", "f32", deterministic=deterministic)
    options = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 4, "token_budget": 100, "chunk_size": 80}
    engine = make_engine(tiny_hybrid(kind), kernels=kernels, max_model_len=200, checkpoint_tokens=32, **options)
    slots, device, storage = engine.slots, engine.slots.device, engine.runner.storage
    assert isinstance(device, TritonSlots)
    assert device.prompts is not None
    device.prompts.sizes = Sizes((24, 104), 3)
    arrays = [array for array in (*storage.convolutions, *storage.recurrent) if array.numel()]
    found: list[tuple[int, int]] = []

    def compared(plan: Any, batch: Any, given: Any) -> Any:
        assert given is None
        numbers = np.array([item.slot for item in plan.scheduled], dtype=np.int32)
        before = [array.clone() for array in arrays]
        captured = device.prompt_logits(batch.on_host(), numbers) if plan.prefills else None
        if captured is not None:
            states = [array.clone() for array in arrays]
            for array, values in zip(arrays, before, strict=True):
                array.copy_(values)
            expected = engine.prefill_executor.run(slots.stage(plan, batch)).numpy()
            np.testing.assert_allclose(captured.numpy(), expected, atol=2e-4, rtol=1e-4)
            for ours, theirs in zip(states, arrays, strict=True):
                np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=2e-5, rtol=1e-4)
            assert not deterministic or np.array_equal(captured.numpy(), expected)
            found.append((len(plan.decodes), max(item.num_new for item in plan.prefills)))
        return captured

    monkeypatch.setattr(slots, "run_on_device", compared)
    arrivals(engine, [5, 130, 70], temperature=0.0)
    assert any(decodes and longest >= LONG for decodes, longest in found), "no step had decodes beside a long prompt"
    assert any(longest < LONG for _, longest in found)


def test_a_batch_that_does_not_fit_runs_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, device = new_engine("llama")
    captured: list[bool] = []
    run = device.prompt_logits

    def watched(batch: Any, slots: np.ndarray) -> Any:
        logits = run(batch, slots)
        captured.append(logits is not None)
        assert captured[-1] == (batch.segments[-1].num_sequences <= SIZES.max_prompts)
        return logits

    monkeypatch.setattr(device, "prompt_logits", watched)
    vocab = engine.model.config.vocab_size
    for number in range(5):
        prompt = random_prompt(3, seed=number, vocab_size=vocab)
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
    while engine.has_work:
        engine.step()
    assert captured == [False]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=SIZES.max_prompts),
    st.sampled_from([16, 32]),
)
def test_tiles_cover_every_query_once(lengths: list[int], rows: int) -> None:
    most = SIZES.most_tiles(sum(lengths), rows)
    owners, firsts = tiles_of(np.array(lengths), rows, most, SIZES.max_prompts)
    assert len(owners) == len(firsts) == most
    covered = [
        (owner, query)
        for owner, first in zip(owners.tolist(), firsts.tolist(), strict=True)
        if owner < SIZES.max_prompts
        for query in range(first, min(first + rows, lengths[owner]))
    ]
    assert sorted(covered) == [(owner, query) for owner, length in enumerate(lengths) for query in range(length)]
    assert not firsts[owners == SIZES.max_prompts].any()
