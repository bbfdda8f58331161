"""Families on a GPU against transformers: rows whose operations Llama does not have, in chunks and in CUDA graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from family_rows import row_folder
from gemma_rows import GEMMA_ROWS
from test_family_rows import LENGTH, TOLERANCE, check_greedy_tokens, worst_chunks

from bifolio.model.huggingface.hf_loader import load_folder
from built_engines import built_runner
from helpers import open_entry, random_prompt, run_chunks, transformers_logits

ROWS = (
    "cohere2", "ernie4_5moe", "gemma2", *GEMMA_ROWS, "glm4", "gptneox", "granite", "hunyuan_dense", "lfm3",
    "mistral3", "olmo", "olmo2", "phi", "qwen2moe", "starcoder2",
)  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_folder_gives_transformers_logits(name: str, new_kernels: Callable[[], Any]) -> None:
    model, folder = row_folder(name)
    theirs = transformers_logits(model, random_prompt(LENGTH + 7))
    assert worst_chunks(load_folder(folder), theirs, (1, 4, LENGTH), 4, new_kernels()) < TOLERANCE


@pytest.mark.parametrize("name", ROWS)
def test_64_greedy_tokens_are_those_of_transformers(name: str, new_kernels: Callable[[], Any]) -> None:
    check_greedy_tokens(name, new_kernels())


def _median_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Of the logits of a token."""
    return float(np.median(np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)))


@pytest.mark.parametrize("name", ROWS)
def test_bf16_logits_are_near_transformers(name: str, gpu_kernels: Callable[..., Any]) -> None:
    model, folder = row_folder(name)
    prompt = random_prompt(40)
    theirs = transformers_logits(model, prompt)
    loaded = load_folder(folder)
    runner, blocks = built_runner(loaded, kernels=gpu_kernels("bf16"), cache_dtype="bf16")
    for chunk_size in (40, 7):
        ours = run_chunks(runner, open_entry(runner, blocks), prompt, chunk_size)
        if loaded.config.moe is not None:  # a rounded score may choose another expert for some tokens
            rounded = transformers_logits(copy.deepcopy(model).bfloat16(), prompt)
            assert _median_error(ours, theirs) < max(4e-2, 1.2 * _median_error(rounded, theirs))
        else:
            assert np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 4e-2
