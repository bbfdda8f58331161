"""`LanguageModel.token_logprobs(exact=True)`: the engine's logprobs of a rollout to the last bit, with gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bifolio import LLM, LanguageModel, SamplingParams
from bifolio.errors import ConfigError
from helpers import cpu_kernel_names, fresh_folder, random_prompt, tiny_folder, tiny_model

pytestmark = pytest.mark.skipif("native" not in cpu_kernel_names(), reason="bits are promised by the native kernels")
DENSE = ("dense", "gemma3", "gpt2", "qwen2", "lfm2")
WITH_EXPERTS = ("qwen3moe", "mixtral", "olmoe", "glm4moe")


def folder_of(name: str) -> Path:
    return tiny_folder(fresh_folder("exact")) if name == "dense" else tiny_model(name, vocab_size=61)[1]


@pytest.mark.full
@pytest.mark.parametrize("name", [*DENSE, *WITH_EXPERTS])
def test_logprobs_of_a_rollout_are_those_of_the_trainer(name: str) -> None:
    folder = folder_of(name)
    llm = LLM(str(folder), kernels="native", block_size=8, max_model_len=96, num_blocks=40, chunk_size=7)
    model = LanguageModel.from_pretrained(folder)
    prompts = [random_prompt(length, length, 61) for length in (5, 12, 23)]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, llm.generate([{"prompt_token_ids": p} for p in prompts], params), strict=True):
        tokens = torch.tensor([[*prompt, *output.outputs[0].token_ids]])
        found = model.token_logprobs(tokens, exact=True)[0, len(prompt) - 1 :]
        scored = output.outputs[0].logprobs
        assert scored is not None
        rollout = [entry[token].logprob for entry, token in zip(scored, output.outputs[0].token_ids, strict=True)]
        assert found.tolist() == rollout
        plain = model.token_logprobs(tokens)[0, len(prompt) - 1 :]
        torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["dense", pytest.param("qwen3moe", marks=pytest.mark.full)])
def test_gradients_are_those_of_torch(name: str) -> None:
    model = LanguageModel.from_pretrained(folder_of(name))
    tokens = torch.tensor([random_prompt(12, 1, 61), random_prompt(12, 2, 61)])
    gradients = []
    for exact in (False, True):
        model.zero_grad()
        model.token_logprobs(tokens, exact=exact).sum().backward()
        gradients.append({key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() == dict(model.named_parameters()).keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, atol=1e-4, rtol=1e-3)


def test_other_types_are_refused() -> None:
    model = LanguageModel.from_pretrained(folder_of("dense")).bfloat16()
    with pytest.raises(ConfigError, match="float32 on the CPU"):
        model.token_logprobs(torch.tensor([[5, 6, 7]]), exact=True)
