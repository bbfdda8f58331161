"""A needle in a crowd: what a request gets depends on the request alone, whatever runs beside it.

The same requests run alone, then inside random traces: others join, end and are aborted around them, a tiny pool
forces preemptions, prefixes are found in the cache, drafts are guessed, and chunk sizes and budgets vary. Tokens must
be identical. Logprobs agree to 1e-5 on kernels that let the matrix library choose its order of summation, and bit for
bit on the native kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from bifolio.config import SpeculativeConfig
from bifolio.engine.engine import InferenceEngine
from bifolio.kernels.interface import KernelSet
from bifolio.model.loaded import LoadedModel
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import FinishReason, Request
from helpers import cpu_kernel_names, drain, make_engine, make_kernels, random_prompt, run_alone

VOCAB = 61
NUM_TRACES = {"reference": 20, "native": 50}  # others: a few, since they share the engine and are slow to start
EXACT = {"native"}

NEEDLES = {
    "greedy": SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=2),
    "seeded": SamplingParams(temperature=1.1, seed=77, max_tokens=14, ignore_eos=True, logprobs=2),
    "filtered": SamplingParams(
        temperature=0.9, seed=5, top_p=0.9, repetition_penalty=1.2, max_tokens=14, ignore_eos=True, logprobs=0
    ),
    "three": SamplingParams(temperature=0.8, seed=3, n=3, max_tokens=9, ignore_eos=True, logprobs=0),
}
PROMPT = random_prompt(19, seed=42, vocab_size=VOCAB)


@cache
def kernels_named(name: str) -> KernelSet:
    return make_kernels(name)


def outcome(request: Request) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and logprobs, rivals included, of every completion."""
    tokens = [list(sequence.output_token_ids) for sequence in request.sequences]
    logprobs = [
        [value for entry in sequence.logprobs for value in (entry.logprob, *(v for _, v in entry.top))]
        for sequence in request.sequences
    ]
    return tokens, logprobs


@cache
def alone(kernel_name: str, needle: str) -> tuple[list[list[int]], list[list[float]]]:
    request = run_alone(PROMPT, NEEDLES[needle], kernels=kernels_named(kernel_name))
    assert all(sequence.finish_reason is FinishReason.LENGTH for sequence in request.sequences)
    return outcome(request)


def crowded_engine(rng: np.random.Generator, kernels: KernelSet, model: LoadedModel | None = None) -> InferenceEngine:
    max_num_seqs = int(rng.integers(3, 6))
    block_size = int(rng.choice([1, 3, 4, 16]))
    return make_engine(
        model,
        kernels=kernels,
        block_size=block_size,
        num_blocks=1 + int(-(-64 // block_size) * rng.choice([1, 1.5, 3])),  # one full sequence fits, or little more
        max_model_len=64,
        max_num_seqs=max_num_seqs,
        token_budget=int(rng.integers(max_num_seqs, 30)),
        chunk_size=int(rng.choice([1, 2, 3, 5, 8, 13, 64])),
        enable_prefix_caching=bool(rng.random() < 0.8),
        speculative=SpeculativeConfig("ngram", adaptive=False) if rng.random() < 0.3 else None,
        checkpoint_tokens=block_size,  # of hybrid models: prompts are short
    )


def neighbours(rng: np.random.Generator) -> Iterator[tuple[list[int], SamplingParams]]:
    while True:
        shared = int(rng.integers(0, len(PROMPT) + 1)) if rng.random() < 0.6 else 0  # prefixes that can be found
        prompt = PROMPT[:shared] + random_prompt(int(rng.integers(1, 12)), int(rng.integers(1 << 30)), VOCAB)
        yield (
            prompt,
            SamplingParams(
                temperature=float(rng.choice([0.0, 1.0])),
                n=int(rng.integers(1, 3)),
                max_tokens=int(rng.integers(1, 16)),
                prompt_logprobs=0 if rng.random() < 0.2 else None,
            ),
        )


def run_in_crowd(engine: InferenceEngine, needle: str, rng: np.random.Generator) -> Request:
    """Neighbours come and go, some are aborted; the needle joins somewhere in between."""
    crowd = neighbours(rng)
    joins_at = int(rng.integers(0, 8))
    request = None
    number = 0
    for step in range(2000):
        if step == joins_at:
            request = engine.add_request("needle", PROMPT, NEEDLES[needle], priority=int(rng.integers(0, 2)))
        if number < 7 and rng.random() < 0.6:
            prompt, params = next(crowd)
            engine.add_request(f"n{number}", prompt, params, priority=int(rng.integers(0, 2)))
            number += 1
        if rng.random() < 0.15:
            engine.abort(f"n{int(rng.integers(0, 7))}")
        engine.step()
        if request is not None and request.is_finished:
            break
    assert request is not None
    assert request.is_finished
    engine.abort_all()
    drain(engine)
    assert engine.blocks.num_used_blocks == 0
    return request


@pytest.mark.full
@pytest.mark.parametrize("kernel_name", cpu_kernel_names())
def test_a_needle_in_a_crowd(kernel_name: str) -> None:
    preemptions = hits = 0
    for trace in range(NUM_TRACES.get(kernel_name, 4)):
        rng = np.random.default_rng(trace)
        needle = list(NEEDLES)[trace % len(NEEDLES)]
        engine = crowded_engine(rng, kernels_named(kernel_name))
        request = run_in_crowd(engine, needle, rng)
        tokens, logprobs = outcome(request)
        expected_tokens, expected_logprobs = alone(kernel_name, needle)
        assert tokens == expected_tokens, f"trace {trace}, {needle}"
        if kernel_name in EXACT:
            assert logprobs == expected_logprobs, f"trace {trace}, {needle}"
        else:
            for ours, theirs in zip(logprobs, expected_logprobs, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
        preemptions += request.metrics.num_preemptions
        hits += request.metrics.num_cached_tokens > 0
    if kernel_name in NUM_TRACES:
        assert preemptions > 0  # the traces do what they are for
        assert hits > 0
