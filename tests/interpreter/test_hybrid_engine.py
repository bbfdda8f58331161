"""Engines with hybrid models on the Triton kernels, in the interpreter: the device lays out states of decode steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from bifolio import LLM
from bifolio.engine.engine import InferenceEngine
from bifolio.kernels.interface import KernelSet
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.triton import TritonKernels
from bifolio.sampling_params import SamplingParams
from helpers import drain, make_engine, output_ids, random_prompt
from hybrid_models import VOCABULARY, tiny_hybrid


def answers(kind: str, kernels: KernelSet) -> tuple[InferenceEngine, list[list[list[int]]]]:
    """Two turns of a conversation, beside another request: decodes, forks, checkpoints and prefix hits."""
    engine = make_engine(tiny_hybrid(kind), kernels=kernels, max_num_seqs=4, checkpoint_tokens=8)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    both = SamplingParams(max_tokens=6, temperature=0.8, seed=3, n=2, ignore_eos=True)
    prompt = random_prompt(13, seed=2, vocab_size=VOCABULARY)
    requests = [
        engine.add_request("first", prompt, params),
        engine.add_request("samples", random_prompt(6, seed=3, vocab_size=VOCABULARY), both),
    ]
    drain(engine)
    history = [*prompt, *requests[0].sequences[0].output_token_ids, 5, 6]
    requests.append(engine.add_request("second", history, params))
    drain(engine)
    assert requests[-1].metrics.num_cached_tokens == 16
    return engine, [output_ids(request) for request in requests]


@pytest.mark.parametrize("kind", ["conv", "delta", "keyed", "lightning", "lru", "mamba", "rwkv", "wide conv"])
def test_the_device_reads_and_writes_the_states_of_its_slots(kind: str) -> None:
    engine, found = answers(kind, TritonKernels("cpu", "f32"))
    assert engine.slots.device is not None
    assert found == answers(kind, ReferenceKernels())[1]
    assert engine.stats().states.num_held_states == 0


@pytest.mark.parametrize("kind", ["conv", "delta", "mamba", "wide conv"])
def test_a_start_that_measures_its_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LLM` on a device measures a step, plans the cache, warms up and answers."""
    kernels = TritonKernels("cpu", "f32")
    monkeypatch.setattr(kernels, "memory", lambda: Memory(2_000_000))
    llm = LLM(
        tiny_hybrid(kind), kernels=kernels, dtype="f32", block_size=4, max_num_seqs=2, max_model_len=32,
        token_budget=32, warm_up=False,
    )  # fmt: skip
    prompt = random_prompt(13, seed=2, vocab_size=VOCABULARY)
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    expected = LLM(tiny_hybrid(kind), kernels=ReferenceKernels()).generate([prompt], greedy)
    assert llm.plan.step_bytes == 1250
    assert llm.generate([prompt], greedy)[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


class Memory:
    """Of a device whose steps take 1000 bytes."""

    def __init__(self, free: int) -> None:
        self._free = free

    def free_bytes(self) -> int:
        return self._free

    def start_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 1000
