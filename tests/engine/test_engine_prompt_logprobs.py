"""Prompt logprobs against those computed from transformers' logits, however the prompt is cut or found."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.sampling_params import SamplingParams
from bifolio.sequence import Request
from helpers import drain, log_softmax, make_engine, random_prompt, tiny_model, transformers_logits

TOLERANCE = 1e-4
ARCHITECTURES = ("gpt2", "mistral", "gemma3")


def expected(architecture: str, prompt: list[int]) -> np.ndarray:
    """f64[t, vocab]: logprobs of what follows each token."""
    return log_softmax(transformers_logits(tiny_model(architecture)[0], prompt))


def check(request: Request, prompt: list[int], logprobs: np.ndarray, num_top: int) -> None:
    entries = request.prompt_logprobs
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for position, entry in enumerate(entries[1:], start=1):
        assert entry is not None
        row = logprobs[position - 1]
        assert entry.token_id == prompt[position]
        assert abs(entry.logprob - row[prompt[position]]) < TOLERANCE
        assert entry.rank == 1 + int((row > row[prompt[position]]).sum())
        assert [token for token, _ in entry.top] == np.argsort(-row)[:num_top].tolist()
        np.testing.assert_allclose([value for _, value in entry.top], np.sort(row)[::-1][:num_top], atol=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("chunk_size", [3, 512])
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_prompt_logprobs(architecture: str, max_tokens: int, chunk_size: int, prefix_caching: bool) -> None:
    engine = make_engine(
        load_folder(tiny_model(architecture)[1]), chunk_size=chunk_size, enable_prefix_caching=prefix_caching
    )
    prompt = random_prompt(14, seed=2)
    logprobs = expected(architecture, prompt)
    engine.add_request("warm", prompt, SamplingParams(max_tokens=1, temperature=0))  # leaves the prefix in the cache
    drain(engine)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=3)
    neighbour = engine.add_request("n", random_prompt(9, seed=3), SamplingParams(max_tokens=4, ignore_eos=True))
    request = engine.add_request("r", prompt, params)
    drain(engine)
    assert neighbour.is_finished
    check(request, prompt, logprobs, 3)
    output = request.sequences[0].output_token_ids
    assert output == ([] if max_tokens == 0 else [int(logprobs[-1].argmax())])


@pytest.mark.full
def test_prompt_logprobs_survive_preemption() -> None:
    engine = make_engine(
        load_folder(tiny_model("mistral")[1]),
        num_blocks=9,
        max_model_len=32,
        max_num_seqs=2,
        chunk_size=4,
        token_budget=6,
    )
    prompts = [random_prompt(12, seed=s) for s in (4, 5)]
    params = SamplingParams(temperature=0, max_tokens=10, prompt_logprobs=2, ignore_eos=True)
    requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    drain(engine)
    assert sum(request.metrics.num_preemptions for request in requests) > 0
    for request, prompt in zip(requests, prompts, strict=True):
        check(request, prompt, expected("mistral", prompt), 2)


@pytest.mark.full
def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    engine = make_engine(load_folder(tiny_model("gpt2")[1]))
    request = engine.add_request("r", [5], SamplingParams(max_tokens=0, prompt_logprobs=0))
    drain(engine)
    assert request.prompt_logprobs == [None]
