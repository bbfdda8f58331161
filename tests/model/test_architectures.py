"""The network against transformers: every architecture, every chunk size, odd shapes; both phases over the cache."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio.api.llm import LLM
from bifolio.kernels.interface import KernelSet
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.sampling_params import SamplingParams
from helpers import (
    ARCHITECTURES,
    WINDOW,
    drain,
    fresh_folder,
    likeliest_tokens,
    make_engine,
    make_runner,
    open_entry,
    random_prompt,
    run_chunks,
    tiny_model,
    transformers_greedy,
    transformers_logits,
)

NewKernels = Callable[[], KernelSet]
pytestmark = pytest.mark.full  # transformers is slow to import
LENGTH = 13
TOLERANCE = 1e-4  # absolute, on logits of several units, in f32


@pytest.fixture(scope="module", params=ARCHITECTURES)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Path]:
    return tiny_model(request.param)


def worst(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max())


def test_prefill_in_chunks_of_every_size_gives_transformers_logits(
    pair: tuple[Any, Path], new_kernels: NewKernels
) -> None:
    model, folder = pair
    prompt = random_prompt(LENGTH)
    theirs = transformers_logits(model, prompt)
    assert theirs.std() > 0.5  # a network whose logits are all alike proves nothing
    runner, blocks = make_runner(load_folder(folder), kernels=new_kernels(), poison=True)
    for chunk_size in range(1, LENGTH + 1):
        entry = open_entry(runner, blocks)
        ours = run_chunks(runner, entry, prompt, chunk_size)
        assert worst(ours, theirs) < TOLERANCE, f"chunks of {chunk_size}"
        blocks.release(entry.sequence_id)


def test_decode_token_by_token_gives_transformers_logits(pair: tuple[Any, Path], new_kernels: NewKernels) -> None:
    model, folder = pair
    tokens = random_prompt(LENGTH + 20, seed=1)
    theirs = transformers_logits(model, tokens)
    runner, blocks = make_runner(load_folder(folder), kernels=new_kernels(), poison=True)
    entry = open_entry(runner, blocks)
    prefilled = run_chunks(runner, entry, tokens[:LENGTH], LENGTH)
    decoded = run_chunks(runner, entry, tokens[LENGTH:], 1, decode=True)
    assert worst(np.concatenate([prefilled, decoded]), theirs) < TOLERANCE


def test_the_same_64_greedy_tokens_as_transformers(pair: tuple[Any, Path], new_kernels: NewKernels) -> None:
    model, folder = pair
    prompts = [random_prompt(length, seed=length) for length in (LENGTH, 1, 17)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    llm = LLM(folder, kernels=new_kernels(), block_size=4, chunk_size=5, max_num_seqs=3, poison_free_blocks=True)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == 64
        assert tokens == likeliest_tokens(model, prompt, tokens)


@pytest.mark.slow
def test_greedy_tokens_are_those_that_transformers_generates(pair: tuple[Any, Path]) -> None:
    model, folder = pair
    prompts = [random_prompt(length, seed=length) for length in (LENGTH, 1, 17)]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, detokenize=False)
    for prompt, output in zip(prompts, LLM(folder).generate(prompts, params), strict=True):
        assert output.outputs[0].token_ids == transformers_greedy(model, prompt, 64)


@pytest.mark.parametrize("architecture", ["llama3-rope", "gemma3"])
def test_the_reference_runs_on_torch_tensors_too(architecture: str) -> None:
    model, folder = tiny_model(architecture)
    prompt = random_prompt(LENGTH)
    runner, blocks = make_runner(load_folder(folder), kernels=TorchKernels("cpu"), poison=True)
    ours = run_chunks(runner, open_entry(runner, blocks), prompt, 5)
    assert worst(ours, transformers_logits(model, prompt)) < TOLERANCE


# -- odd shapes -------------------------------------------------------------------------------------------------------

HEAD_SIZES = (16, 64, 80)
BLOCK_SIZES = (1, 4, 16, 32)
GROUPS = ((3, 3), (4, 1), (14, 2))  # (query heads, key/value heads): groups of 1, 4 and 7
FAMILIES = ("llama", "mistral", "qwen3", "gemma3", "qwen2")


def odd_shapes() -> list[tuple[str, int, int, tuple[int, int]]]:
    """Every pair of (head size, block size), (group, head size) and (group, block size) occurs."""
    combinations = []
    for h, head_dim in enumerate(HEAD_SIZES):
        for b, block_size in enumerate(BLOCK_SIZES):
            family = FAMILIES[(h * len(BLOCK_SIZES) + b) % len(FAMILIES)]
            combinations.append((family, head_dim, block_size, GROUPS[(h + b) % len(GROUPS)]))
    return combinations


@pytest.mark.parametrize(("family", "head_dim", "block_size", "heads"), odd_shapes())
def test_odd_shapes(family: str, head_dim: int, block_size: int, heads: tuple[int, int]) -> None:
    model, folder = tiny_model(
        family,
        hidden_size=84,  # a multiple of every number of heads, which some configurations insist on
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=head_dim,
        initializer_range=0.1,  # heads of 80 make long sums: keep the logits in a range where 1e-4 means something
    )
    prompt = random_prompt(17, seed=head_dim + block_size)
    theirs = transformers_logits(model, prompt)
    loaded = load_folder(folder)
    assert (loaded.config.head_dim, loaded.config.num_heads // loaded.config.num_kv_heads) == (
        head_dim,
        heads[0] // heads[1],
    )
    runner, blocks = make_runner(loaded, num_blocks=64, block_size=block_size, poison=True)
    for chunk_size in (1, 6, 17):
        ours = run_chunks(runner, open_entry(runner, blocks), prompt, chunk_size, decode=chunk_size == 1)
        assert worst(ours, theirs) < TOLERANCE, f"chunks of {chunk_size}"


@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_gpt2_head_sizes(head_dim: int) -> None:
    model, folder = tiny_model("gpt2", n_embd=2 * head_dim, n_head=2, initializer_range=0.1)
    prompt = random_prompt(9)
    runner, blocks = make_runner(load_folder(folder), block_size=4, poison=True)
    ours = run_chunks(runner, open_entry(runner, blocks), prompt, 4)
    assert worst(ours, transformers_logits(model, prompt)) < TOLERANCE


@pytest.mark.parametrize("window", [1, 2, WINDOW, 16])
def test_sliding_windows_shorter_than_the_prompt(window: int) -> None:
    model, folder = tiny_model("mistral", sliding_window=window)
    prompt = random_prompt(17, seed=window)
    runner, blocks = make_runner(load_folder(folder), poison=True)
    theirs = transformers_logits(model, prompt)
    for chunk_size in (1, 4, 17):
        ours = run_chunks(runner, open_entry(runner, blocks), prompt, chunk_size)
        assert worst(ours, theirs) < TOLERANCE
    unlimited, _ = tiny_model("mistral", sliding_window=None)
    assert worst(transformers_logits(unlimited, prompt), theirs) > 0.01  # the window is really felt


# -- configurations that real models have ---------------------------------------------------------------------------

LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
            "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0,
                                       "original_max_position_embeddings": 32}}),
        ("gemma3", {"final_logit_softcapping": 3.0, "tie_word_embeddings": True}),
        ("gpt2", {"activation_function": "gelu", "n_inner": 80}),
        ("gpt2", {"activation_function": "gelu_new"}),
    ],
)  # fmt: skip
def test_variants(architecture: str, overrides: dict[str, Any]) -> None:
    model, folder = tiny_model.__wrapped__(architecture, **deepcopy(overrides))
    prompt = random_prompt(LENGTH)
    runner, blocks = make_runner(load_folder(folder), poison=True)
    ours = run_chunks(runner, open_entry(runner, blocks), prompt, 4)
    assert worst(ours, transformers_logits(model, prompt)) < TOLERANCE


@pytest.mark.parametrize("length", [20, 32, 33, 40])
def test_longrope_like_transformers_on_either_side_of_the_original_context(length: int) -> None:
    model, folder = tiny_model.__wrapped__(
        "phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=32, max_position_embeddings=128
    )
    prompt = random_prompt(length)
    runner, blocks = make_runner(load_folder(folder), poison=True)
    ours = run_chunks(runner, open_entry(runner, blocks), prompt, length)
    assert worst(ours, transformers_logits(model, prompt)) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_folders_are_read_exactly(dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = fresh_folder(dtype)
    deepcopy(tiny_model("llama")[0]).to(getattr(torch, dtype)).save_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = random_prompt(LENGTH)
    runner, blocks = make_runner(load_folder(folder))
    ours = run_chunks(runner, open_entry(runner, blocks), prompt, LENGTH)
    assert worst(ours, transformers_logits(theirs, prompt)) < TOLERANCE


def test_sharded_folders_are_read_whole() -> None:
    model, _ = tiny_model("smollm2")
    folder = fresh_folder("sharded")
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    prompt = random_prompt(LENGTH)
    runner, blocks = make_runner(load_folder(folder))
    ours = run_chunks(runner, open_entry(runner, blocks), prompt, LENGTH)
    assert worst(ours, transformers_logits(model, prompt)) < TOLERANCE


def test_parameter_count_is_exact(pair: tuple[Any, Path]) -> None:
    model, folder = pair
    assert load_folder(folder).config.num_parameters == sum(p.numel() for p in model.parameters())


def test_an_engine_runs_every_architecture_on_one_poisoned_cache(pair: tuple[Any, Path]) -> None:
    """Mixed steps of both phases, prefix hits and preemptions: the tokens stay those of transformers."""
    model, folder = pair
    engine = make_engine(
        load_folder(folder), num_blocks=14, max_model_len=48, max_num_seqs=3, token_budget=9, chunk_size=4
    )
    shared = random_prompt(9, seed=3)
    prompts = [shared + random_prompt(4, seed=i) for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    requests = [engine.add_request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    drain(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        tokens = request.sequences[0].output_token_ids
        assert len(tokens) == 12
        assert tokens == likeliest_tokens(model, prompt, tokens)
    assert engine.blocks.num_used_blocks == 0
