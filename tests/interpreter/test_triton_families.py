"""Families on the Triton kernels, in the interpreter: rows whose operations Llama does not have."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "model"))

from family_rows import row_folder
from test_family_rows import LENGTH, TOLERANCE, worst_chunks

from bifolio.kernels.triton import TritonKernels
from bifolio.model.huggingface.hf_loader import load_folder
from helpers import random_prompt, transformers_logits

GEMMA4 = ("gemma4", "gemma4 with experts", "gemma4 with inputs of layers")
SCANNED = ("falcon_mamba", "jamba", "mamba", "minimax", "recurrent_gemma")
ROWS = (
    "bitnet",
    "bloom",
    *SCANNED,
    "llama4",
    "mpt",
    "cohere2",
    "deepseek_v32",
    "deepseek_v4",
    "gemma2",
    "gemma3n",
    *GEMMA4,
    "glm_moe_dsa",
    "granite",
    "hunyuan_dense",
    "kimi_linear",
    "lfm3",
    "longcat_flash",
    "mimo_v2_flash",
    "mistral3",
    "olmo2",
    "starcoder2",
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "deterministic"),
    [*((name, False) for name in ROWS), ("deepseek_v32", True), ("gemma2", True), ("gemma4", True)],
)
def test_a_folder_gives_transformers_logits(name: str, deterministic: bool) -> None:
    model, folder = row_folder(name)
    theirs = transformers_logits(model, random_prompt(LENGTH + 1))
    kernels = TritonKernels("cpu", "f32", deterministic=deterministic)
    assert worst_chunks(load_folder(folder), theirs, (7,), 4, kernels) < TOLERANCE
