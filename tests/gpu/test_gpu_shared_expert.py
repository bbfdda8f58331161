"""The shared MLP of a layer as one more expert on a GPU, and gates: the checks of the interpreter, in f32 and bf16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
from family_rows import row_model, save_row
from shared_expert_checks import (
    ALIKE,
    DIFFERENT,
    TOKENS,
    check_alone,
    check_choice,
    check_folded,
    check_like_unfolded,
    check_unfolded,
)
from test_family_rows import LENGTH, TOLERANCE, worst_chunks

from bifolio.model.huggingface.hf_loader import load_folder
from helpers import random_prompt, transformers_logits

pytestmark = pytest.mark.usefixtures("own_kernels", "compiled")
CLOSE = 1e-4


@pytest.mark.parametrize("tokens", [*TOKENS, 700])
@pytest.mark.parametrize("name", ALIKE)
def test_a_shared_mlp_like_the_experts_is_one_of_them(name: str, tokens: int, gpu_kernels: Callable[..., Any]) -> None:
    check_folded(gpu_kernels("f32"), name, tokens, CLOSE)


@pytest.mark.parametrize("tokens", [*TOKENS, 700])
@pytest.mark.parametrize("name", ALIKE)
def test_bf16_is_near_the_mlp_beside_the_experts(name: str, tokens: int, gpu_kernels: Callable[..., Any]) -> None:
    check_like_unfolded(gpu_kernels("bf16"), name, tokens, 2e-2)


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_shared_mlp_is_computed_beside_them(name: str, gpu_kernels: Callable[..., Any]) -> None:
    check_unfolded(gpu_kernels("f32"), name, 1, CLOSE)
    check_unfolded(gpu_kernels("f32"), name, 40, CLOSE)


@pytest.mark.parametrize("name", ["gate", "no gate", "gate, Q8_0"])
def test_the_bits_of_a_token_do_not_depend_on_its_neighbours(name: str, gpu_kernels: Callable[..., Any]) -> None:
    check_alone(gpu_kernels("bf16", deterministic=True), name)


@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 5), (128, 8), (512, 10), (1000, 10)])
def test_choices_are_those_of_torch(num_experts: int, top_k: int, gpu_kernels: Callable[..., Any]) -> None:
    check_choice(gpu_kernels("f32"), num_experts, top_k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (7, 100), (300, 2048)])
def test_a_gate_is_that_of_torch(rows: int, width: int, dtype: torch.dtype, gpu_kernels: Callable[..., Any]) -> None:
    x = torch.randn(rows, width, device="cuda", dtype=dtype)
    for columns in (1, 4, width // 2, width):
        logits = torch.randn(rows, columns, device="cuda", dtype=dtype) * 3
        opened = torch.sigmoid(logits.float()).to(dtype).repeat_interleave(width // columns, 1)
        expected = opened * x
        torch.testing.assert_close(gpu_kernels("bf16").gate(x, logits), expected)


@pytest.mark.parametrize("name", ["qwen3next", "qwen35moe"])
@pytest.mark.parametrize("width", [32, 48])
def test_a_hybrid_family_gives_transformers_logits(
    name: str, width: int, tmp_path: Path, gpu_kernels: Callable[..., Any]
) -> None:
    model = row_model(name, shared_expert_intermediate_size=width)
    save_row(name, model, tmp_path)
    theirs = transformers_logits(model, random_prompt(LENGTH + 7))
    assert worst_chunks(load_folder(tmp_path), theirs, (1, 4, LENGTH), 4, gpu_kernels("f32")) < TOLERANCE
