"""Deterministic mode at real sizes: requests to Llama 1B's shape give the same bits alone, batched, cut and cached.

The weights are random. Tokens are drawn with temperatures and filters, and the logprobs of all tokens are compared to
the last bit. Without a GPU (`--device torch`) the same tests run on a tiny shape and the CPU's native kernels, which
promise the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bifolio import LLM, SamplingParams
from bifolio.api.outputs import RequestOutput
from bifolio.model.loaded import LoadedModel

pytestmark = pytest.mark.one_process
MODEL_LENGTHS = {"cuda": (2048, 16384), "cpu": (48, 96)}  # of max_model_len
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.3, "seed": 3, "min_p": 0.02, "repetition_penalty": 1.2},
]
Outcome = list[tuple[tuple[int, ...], tuple[float, ...]]]  # tokens and logprobs of each completion


@pytest.fixture(scope="module")
def model(device: str) -> Iterator[LoadedModel]:
    import torch

    from gpu_models import random_weights, shape_config

    if device == "cpu":
        yield random_weights(shape_config("tiny"), device, "f32")
        return
    config = shape_config("llama-1b")
    sizes = (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim)
    assert (*sizes, config.vocab_size) == (2048, 16, 32, 8, 64, 128256)
    yield random_weights(config, device)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module", params=[0, 1], ids=["short contexts", "long contexts"])
def max_model_len(request: pytest.FixtureRequest, device: str) -> int:
    return MODEL_LENGTHS["cpu" if device == "cpu" else "cuda"][request.param]


def new_llm(model: LoadedModel, device: str, max_model_len: int, **options: Any) -> LLM:
    """An LLM whose cache is sized by the step that is tried; other tests share the GPU, so it takes a small part."""
    if device == "cpu":
        sizes: dict[str, Any] = {"num_blocks": 120, "block_size": 16, "token_budget": 256, "chunk_size": 256}
        options = {**sizes, **options, "max_num_seqs": 12, "kernels": "native"}
    else:
        options = {**options, "gpu_memory_utilization": 0.2}
    return LLM(model, device=device, deterministic=True, max_model_len=max_model_len, **options)


def requests_of(max_model_len: int, vocab_size: int, num_new: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of one token, around the edge of a block, of half the model's length and of all but the new tokens."""
    block = 64 if max_model_len > 1000 else 16
    lengths = [1, block - 1, block, block + 1, max_model_len // 2, max_model_len - num_new]
    found = []
    for number, length in enumerate(lengths):
        tokens = np.random.default_rng(length).integers(0, vocab_size, length).tolist()
        options = {**SAMPLING[number % len(SAMPLING)], "max_tokens": num_new, "ignore_eos": True}
        found.append((tokens, SamplingParams(**options, logprobs=2)))
    found.append((found[4][0], SamplingParams(temperature=0.9, seed=9, n=2, max_tokens=num_new, ignore_eos=True)))
    found.append((found[4][0], SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)))  # a decode graph
    return found


def outcome(output: RequestOutput) -> Outcome:
    return [(tuple(each.token_ids), tuple(entry.logprob for entry in each.logprobs or ())) for each in output.outputs]


def generate(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[Outcome]:
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    assert llm.engine.blocks.num_used_blocks == 0
    return [outcome(output) for output in outputs]


def test_a_request_gives_the_same_bits_however_it_is_run(
    model: LoadedModel, device: str, max_model_len: int, release_gpu: None
) -> None:
    """Alone; with all others; in reverse order with chunks of another size; from a cached prefix."""
    num_new = 4 if device == "cpu" else 16
    requests = requests_of(max_model_len, model.config.vocab_size, num_new)
    llm = new_llm(model, device, max_model_len, enable_prefix_caching=False)
    alone = [generate(llm, [request])[0] for request in requests]
    tokens = [completion[0] for each in alone for completion in each]
    assert all(len(each) == num_new for each in tokens)
    assert len(set(tokens)) >= len(requests) - 1  # two requests of one prompt may agree, others differ
    assert generate(llm, requests) == alone
    del llm
    chunk = 7 if device == "cpu" else 500
    llm = new_llm(model, device, max_model_len, chunk_size=chunk, token_budget=3 * chunk)
    assert generate(llm, requests[::-1]) == alone[::-1]
    assert generate(llm, requests) == alone


def test_steps_of_every_batch_size_give_the_same_bits(
    model: LoadedModel, device: str, max_model_len: int, release_gpu: None
) -> None:
    """Greedy tokens of one request while 0, 1, 8 and 39 other sequences decode: graphs of several sizes."""
    num_new, crowds = (4, (0, 1, 8)) if device == "cpu" else (24, (0, 1, 8, 39))
    vocab_size = model.config.vocab_size
    llm = new_llm(model, device, max_model_len)
    needle = np.random.default_rng(0).integers(0, vocab_size, max_model_len // 3).tolist()
    greedy = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    found = []
    for crowd in crowds:
        others = [np.random.default_rng(n).integers(0, vocab_size, 3 + 5 * (n % 6)).tolist() for n in range(crowd)]
        requests = [(other, greedy) for other in others]
        requests.insert(crowd // 2, (needle, greedy))
        found.append(generate(llm, requests)[crowd // 2])
    assert all(each == found[0] for each in found)


def test_another_engine_gives_the_same_bits(
    model: LoadedModel, device: str, max_model_len: int, release_gpu: None
) -> None:
    """Two engines one after the other, with caches of different sizes: neither place nor reuse of memory shows."""
    requests = requests_of(max_model_len, model.config.vocab_size, 4 if device == "cpu" else 16)[1:]
    found = []
    for extra in (0, 5):
        num_blocks = 2 * sum(-(-len(prompt) // 16) + 2 for prompt, _ in requests) + 8 + extra
        found.append(generate(new_llm(model, device, max_model_len, block_size=16, num_blocks=num_blocks), requests))
    assert found[0] == found[1]
