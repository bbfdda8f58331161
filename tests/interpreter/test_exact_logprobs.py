"""A trainer's pass over whole sequences gives the logprobs of a deterministic engine's rollouts, bit by bit."""

from __future__ import annotations

import pytest
import torch

from bifolio import LLM, LanguageModel, SamplingParams
from bifolio.api.exact_network import engine_logits
from bifolio.api.language_model import fresh_batch
from bifolio.kernels.triton import TritonKernels
from bifolio.sampling.sampler import prompt_logprobs
from helpers import fresh_folder, random_prompt, tiny_folder, tiny_model

PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", ["dense", "qwen3moe"])
def test_logprobs_of_a_rollout_are_those_of_the_trainer(name: str, dtype: str) -> None:
    folder = tiny_folder(fresh_folder("exact")) if name == "dense" else tiny_model(name, vocab_size=61)[1]
    sizes = {"block_size": 16, "max_model_len": 48, "num_blocks": 20, "max_num_seqs": 2, "warm_up": False}
    llm = LLM(str(folder), kernels=TritonKernels("cpu", dtype, deterministic=True), deterministic=True, **sizes)
    prompt, model = random_prompt(12, 12, 61), LanguageModel.from_pretrained(folder)
    model = model.bfloat16() if dtype == "bf16" else model
    [output] = llm.generate([{"prompt_token_ids": prompt}], PARAMS)
    answer, scored = output.outputs[0].token_ids, output.outputs[0].logprobs
    assert scored is not None
    kernels, tokens = TritonKernels("cpu", dtype, deterministic=True), torch.tensor([[*prompt, *answer]])
    logits = kernels.to_host(engine_logits(model.weights(), fresh_batch(tokens, kernels), kernels))
    found = prompt_logprobs(logits[:-1], tokens[0, 1:].numpy(), 0).logprobs[len(prompt) - 1 :]
    assert found.tolist() == [entry[token].logprob for entry, token in zip(scored, answer, strict=True)]
