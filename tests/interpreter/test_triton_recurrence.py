"""Recurrent layers on the Triton kernels, in the interpreter: chunks, engines, and steps on the device's slots."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from recurrence_cases import KINDS, new_recurrence, normal, recur_in_chunks, state_storage, states_of

from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton.cuda_graphs import DecodeGraphs
from bifolio.sampling_params import SamplingParams
from helpers import drain, make_engine, output_ids, random_prompt
from hybrid_models import VOCABULARY, tiny_hybrid


@pytest.mark.parametrize("name", ["conv", "delta", "mamba"])
def test_passes_of_any_size_give_the_same(name: str) -> None:
    """Bit for bit: a token's program computes the same in every pass."""
    kind, changes = KINDS[name]
    kernels, recurrence = TritonKernels("cpu", "f32"), new_recurrence(np.random.default_rng(5), kind, **changes)
    rows, storage = normal(np.random.default_rng(6), 11, recurrence.in_features), state_storage(kernels, recurrence, 2)
    whole = recur_in_chunks(kernels, recurrence, rows, 11, storage)
    last = states_of(kernels, storage, recurrence, [1])
    for chunk in (1, 2, 3, 7):
        np.testing.assert_array_equal(recur_in_chunks(kernels, recurrence, rows, chunk, storage), whole)
        for ours, theirs in zip(states_of(kernels, storage, recurrence, [1]), last, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["conv", "delta", "mamba"])
def test_an_engine_of_a_hybrid_equals_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of different lengths, of which two share a prefix; decode steps read their states from the slots."""
    launched, launch = [], DecodeGraphs.launch

    def counted(self: DecodeGraphs, *arguments: object) -> object:
        launched.append(arguments)
        return launch(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DecodeGraphs, "launch", counted)
    shared = random_prompt(9, seed=1, vocab_size=VOCABULARY)
    prompts = [shared, [*shared[:8], 5, 6], random_prompt(4, seed=2, vocab_size=VOCABULARY)]
    texts = []
    for kernels in (ReferenceKernels(), TritonKernels("cpu", "f32")):
        engine = make_engine(tiny_hybrid(kind), kernels=kernels, block_size=4)
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        drain(engine)
        texts.append([output_ids(request) for request in requests])
    assert texts[0] == texts[1]
    assert launched
