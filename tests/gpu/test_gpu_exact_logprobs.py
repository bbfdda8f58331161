"""`LanguageModel.token_logprobs(exact=True)` on a GPU: the logprobs of a deterministic engine's rollouts, bit by bit.

Without a GPU tests/interpreter compares the passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bifolio import LLM, LanguageModel, SamplingParams
from helpers import fresh_folder, random_prompt, tiny_folder, tiny_model

NAMES = ("dense", "gemma3", "lfm2", "qwen3moe", "mixtral")
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, logprobs=0, detokenize=False)


@pytest.mark.usefixtures("own_kernels")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_logprobs_of_a_rollout_are_those_of_the_trainer(
    name: str, dtype: str, device: str, gpu_kernels: Callable[..., Any]
) -> None:
    if not device.startswith("cuda"):
        pytest.skip("the trainer's parameters are on a GPU")
    folder = tiny_folder(fresh_folder("exact")) if name == "dense" else tiny_model(name, vocab_size=61)[1]
    sizes = {"block_size": 16, "max_model_len": 96, "num_blocks": 60, "chunk_size": 16}
    model = LanguageModel.from_pretrained(folder).to(device)
    if dtype == "bf16":  # norms are rounded too
        model, folder = model.bfloat16(), fresh_folder("rounded")
        model.save_pretrained(folder)
    llm = LLM(str(folder), kernels=gpu_kernels(dtype, deterministic=True), deterministic=True, **sizes)
    prompts = [random_prompt(length, length, 61) for length in (5, 12, 23)]
    for prompt, output in zip(prompts, llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS), strict=True):
        tokens = torch.tensor([[*prompt, *output.outputs[0].token_ids]], device=device)
        found = model.token_logprobs(tokens, exact=True)[0, len(prompt) - 1 :]
        scored = output.outputs[0].logprobs
        assert scored is not None
        rollout = [entry[token].logprob for entry, token in zip(scored, output.outputs[0].token_ids, strict=True)]
        assert found.tolist() == rollout
    gradients = []
    for exact in (False, True):
        model.zero_grad()
        model.token_logprobs(tokens, exact=exact).sum().backward()
        gradients.append([value.grad.clone() for value in model.parameters() if value.grad is not None])
    for own, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(own, plain, atol=2e-2 if dtype == "bf16" else 1e-5, rtol=1e-2)
