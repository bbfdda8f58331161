"""Draft heads on the Triton kernels, in the interpreter: passes with and without hidden states, and the plain text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from bifolio import SpeculativeConfig
from bifolio.engine.speculative.hidden_draft import HiddenDraft
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton.products import Products
from bifolio.model.eagle import load_eagle
from bifolio.sampling_params import SamplingParams
from draft_heads import eagle_folder
from helpers import make_engine, output_ids, random_prompt, tiny_loaded


@pytest.mark.parametrize("adaptive", [False, True])
def test_texts_are_the_plain_run_s(adaptive: bool) -> None:
    """Adaptive lengths measure plain steps first, as graphs without hidden states."""
    folder, found, drafts = eagle_folder(), [], []
    config = SpeculativeConfig("eagle", draft_model=str(folder), length=2, adaptive=adaptive)
    for kernels, speculative in ((TorchKernels("cpu"), None), (TritonKernels("cpu", "f32"), config)):
        head = None if speculative is None else load_eagle(folder, tiny_loaded())
        engine = make_engine(kernels=kernels, speculative=speculative, draft_model=head)  # type: ignore[arg-type]
        options = [SamplingParams(temperature=0.8 * i, seed=i, max_tokens=7, ignore_eos=True) for i in range(2)]
        requests = [engine.add_request(str(i), random_prompt(5 + i, i, 61), each) for i, each in enumerate(options)]
        while engine.has_work:
            engine.step()
        assert all(request.error is None for request in requests)
        found.append([output_ids(request) for request in requests])
        drafts.append(0 if engine.speculator is None else engine.speculator.stats.num_draft_tokens)
    assert found[0] == found[1]
    assert drafts[1] > 3 or adaptive


def test_drafts_in_one_launch_are_those_of_single_passes() -> None:
    """Greedy and sampled, with a smaller vocabulary; the host draws the second time."""
    folder, found = eagle_folder(), []
    config = SpeculativeConfig("eagle", draft_model=str(folder), length=3, adaptive=False)
    for on_device in (True, False):
        head = load_eagle(folder, tiny_loaded())
        engine = make_engine(kernels=TritonKernels("cpu", "f32"), speculative=config, draft_model=head)  # type: ignore[arg-type]
        assert engine.speculator is not None
        drafter, drafts = engine.speculator.drafter, []
        assert isinstance(drafter, HiddenDraft)
        assert drafter.runner.on_device is not None
        if not on_device:
            drafter.runner.on_device = None
        known = engine.speculator.known

        def watched(item: Any, known: Any = known, drafts: list[Any] = drafts) -> tuple[int, ...]:
            drafts.append((item.slot, item.start, known(item)))
            return drafts[-1][2]

        engine.speculator.known = watched  # type: ignore[method-assign]
        for i in range(2):
            params = SamplingParams(temperature=0.8 * i, seed=i, max_tokens=8, ignore_eos=True)
            engine.add_request(str(i), random_prompt(5 + i, i, 61), params)
        while engine.has_work:
            engine.step()
        found.append(drafts)
    assert found[0] == found[1]
    assert len(found[0]) > 4


def test_passes_of_a_head_in_16_bits_fit_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice more than 16 tokens: products of many rows are added in f32, but queries are those that a step expects."""
    monkeypatch.setattr(Products, "_is_ours", lambda products, rows, linear: False)
    folder = eagle_folder()
    config = SpeculativeConfig("eagle", draft_model=str(folder), length=2, adaptive=False)
    head = load_eagle(folder, tiny_loaded())
    kernels = TritonKernels("cpu", "bf16")
    engine = make_engine(kernels=kernels, speculative=config, draft_model=head, cache_dtype="bf16")  # type: ignore[arg-type]
    failures: list[Exception] = []
    monkeypatch.setattr(engine.faults, "recover", lambda error: failures.append(error) or [])
    for number in range(2):
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        engine.add_request(str(number), random_prompt(20, number, 61), params)
        while engine.has_work and not failures:
            engine.step()
    assert not failures
    assert engine.speculator is not None
    assert engine.speculator.stats.num_draft_tokens > 2
