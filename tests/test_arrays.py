"""The engine's own array functions for torch give what array-api-compat gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bifolio import arrays
from bifolio.sampling.sampler import Sampler, SamplingTable
from bifolio.sampling_params import SamplingParams

torch = pytest.importorskip("torch")

EVERY_FILTER = {
    "plain": SamplingParams(temperature=1.0, seed=1),
    "top_k": SamplingParams(temperature=0.7, seed=2, top_k=5),
    "top_p": SamplingParams(temperature=1.2, seed=3, top_p=0.8, min_p=0.01),
    "typical": SamplingParams(temperature=1.0, seed=4, typical_p=0.7),
    "xtc": SamplingParams(temperature=1.0, seed=5, xtc_probability=0.9, xtc_threshold=0.05),
    "greedy": SamplingParams(temperature=0.0, logprobs=3),
    "penalised": SamplingParams(temperature=1.0, seed=6, repetition_penalty=1.3, presence_penalty=0.5),
}


def drawn(logits: Any) -> list[Any]:
    vocab = logits.shape[1]
    table = SamplingTable(len(EVERY_FILTER), vocab)
    for slot, params in enumerate(EVERY_FILTER.values()):
        table.set(slot, params, params.seed or 0, [1, 2, 3], [4, 5])
    slots = np.arange(len(EVERY_FILTER))
    outcome = Sampler(vocab, table).sample(logits, slots, slots + 7)
    return [outcome.token_ids.tolist(), np.nan_to_num(outcome.logprobs).tolist(), outcome.ranks.tolist(), outcome.top]


@pytest.mark.parametrize("vocab", [50, 5000])
def test_sampling_needs_no_array_library(monkeypatch: pytest.MonkeyPatch, vocab: int) -> None:
    logits = np.random.default_rng(vocab).standard_normal((len(EVERY_FILTER), vocab), dtype=np.float32) * 3
    expected = drawn(torch.from_numpy(logits))
    monkeypatch.setattr(arrays, "_compat", lambda: None)
    assert drawn(torch.from_numpy(logits)) == expected
