"""Experts in the memory of the host beside a GPU: captured steps call them, long prompts copy them to the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.random_files import write_model
from benchmarks.shapes import SHAPES, tiny
from bifolio import LLM, SamplingParams
from helpers import random_prompt

LENGTHS = (3, 40, 300, 420)  # the last two have more rows than a stream hands over
SIZES: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "num_blocks": 200, "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture") / "mixture.gguf"
    write_model(path, tiny(SHAPES["qwen3-30b-a3b"]), "q8_0")
    return path


pytestmark = pytest.mark.skipif("config.getoption('device') != 'cuda'", reason="the stream of a GPU calls the host")


def prompts(llm: LLM) -> list[Any]:
    vocab = llm.model.config.vocab_size
    return [{"prompt_token_ids": random_prompt(length, seed=length, vocab_size=vocab)} for length in LENGTHS]


def answers(llm: LLM, given: list[Any], **options: Any) -> list[tuple[list[int], np.ndarray]]:
    """Tokens, and the logprobs of prompts and of tokens."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0, **options)
    found = []
    for output in llm.generate(given, params, use_tqdm=False):
        assert output.error is None, output.error
        (answer,) = output.outputs
        assert answer.logprobs is not None
        assert output.prompt_logprobs is not None
        places = [*output.prompt_logprobs[1:], *answer.logprobs]
        found.append((list(answer.token_ids), np.array([_one(place) for place in places])))
    return found


def _one(place: Any) -> float:
    return float(place.logprob if hasattr(place, "logprob") else next(iter(place.values())).logprob)


def oracle(model: Path, given: list[Any], tokens: list[list[int]]) -> list[np.ndarray]:
    """The logprobs of the same texts by torch on a CPU."""
    texts: Any = [{"prompt_token_ids": [*g["prompt_token_ids"], *t]} for g, t in zip(given, tokens, strict=True)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with LLM(model, kernels="torch", device="cpu", **SIZES) as llm:
        outputs = llm.generate(texts, params, use_tqdm=False)
    return [np.array([_one(place) for place in (output.prompt_logprobs or [])[1:]]) for output in outputs]


@pytest.mark.parametrize("copies", [False, True])
def test_logprobs_are_those_of_the_cpu(
    model: Path, copies: bool, device: str, release_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bifolio.kernels.triton.expert_stream import ExpertStream

    monkeypatch.setattr(ExpertStream, "is_faster", lambda self, *sizes: copies)
    copied: list[int] = []
    stacks = ExpertStream.stacks
    monkeypatch.setattr(ExpertStream, "stacks", lambda self, layer: copied.append(layer.number) or stacks(self, layer))
    with LLM(model, device=device, cpu_experts="all", warm_up=True, **SIZES) as llm:
        assert llm.plan.host_layers == llm.model.config.num_layers
        given = prompts(llm)
        together = answers(llm, given)
        alone = [answers(llm, [each])[0] for each in given]
    assert bool(copied) == copies
    for found in (together, alone):
        expected = oracle(model, given, [tokens for tokens, _ in found])
        for (_, ours), theirs in zip(found, expected, strict=True):
            difference = np.abs(ours - theirs)
            assert difference.mean() < 0.03
            assert (difference < 0.15).mean() > 0.97  # rounding makes few tokens choose another expert


def test_a_request_has_the_same_bits_in_a_batch(model: Path, device: str, release_gpu: None) -> None:
    with LLM(model, device=device, cpu_experts=1, deterministic=True, **SIZES) as llm:
        given = prompts(llm)
        together = answers(llm, given)
        for each, (tokens, logprobs) in zip(given, together, strict=True):
            ((own, scores),) = answers(llm, [each])
            assert own == tokens
            np.testing.assert_array_equal(scores, logprobs)
