"""The shared MLP of a layer as one more expert on the Triton kernels, in the interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "model"))

from family_rows import row_model, save_row
from shared_expert_checks import (
    ALIKE,
    DIFFERENT,
    NO_TOKENS,
    NORM,
    TOKENS,
    check_alone,
    check_choice,
    check_folded,
    check_like_unfolded,
    check_unfolded,
    inputs,
    new_layer,
)
from test_family_rows import LENGTH, TOLERANCE, worst_chunks

from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton.experts import tile_rows
from bifolio.model.feed_forward import feed_forward
from bifolio.model.huggingface.hf_loader import load_folder
from bifolio.model.weights import prepare, prepare_layer
from helpers import random_prompt, tiny_model, transformers_logits

CLOSE = 2e-5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", ALIKE)
def test_a_shared_mlp_like_the_experts_is_one_of_them(name: str, tokens: int) -> None:
    check_folded(TritonKernels("cpu", "f32"), name, tokens, CLOSE)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", ["gate", "no gate"])
def test_f16_is_near_the_mlp_beside_the_experts(name: str, tokens: int) -> None:
    check_like_unfolded(TritonKernels("cpu", "f16"), name, tokens, 3e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", DIFFERENT)
def test_another_shared_mlp_is_computed_beside_them(name: str, tokens: int) -> None:
    check_unfolded(TritonKernels("cpu", "f32"), name, tokens, CLOSE)


@pytest.mark.parametrize("name", ["gate", "no gate", "gate, Q8_0"])
def test_the_bits_of_a_token_do_not_depend_on_its_neighbours(name: str) -> None:
    kernels = TritonKernels("cpu", "f16", deterministic=True)
    check_folded(kernels, name, 5, 5e-3)
    check_alone(kernels, name)


@pytest.mark.parametrize(("num_experts", "top_k"), [(5, 5), (128, 8), (512, 10)])
def test_choices_are_those_of_torch(num_experts: int, top_k: int) -> None:
    check_choice(TritonKernels("cpu", "f32"), num_experts, top_k)


def test_other_kernel_sets_keep_the_layer() -> None:
    for kernels in (ReferenceKernels(), TorchKernels("cpu")):
        prepared = prepare_layer(new_layer("gate")[1], kernels)
        assert prepared.up.parts
        assert prepared.moe is not None
        assert prepared.moe.shared_gate is not None


def test_a_shared_expert_does_not_change_the_tiles_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from bifolio.kernels.triton import experts as moe

    found = []

    def noted(pairs: int, num_experts: int, kind: int, fixed: bool) -> int:
        found.append((pairs, num_experts))
        return tile_rows(pairs, num_experts, kind, fixed)

    monkeypatch.setattr(moe, "tile_rows", noted)
    check_folded(TritonKernels("cpu", "f32"), "gate", 40, CLOSE)
    assert found == [(40 * 3, 8)]


@pytest.mark.parametrize(
    ("name", "width", "deterministic"),
    [("qwen3next", 32, False), ("qwen35moe", 32, False), ("qwen3next", 32, True), ("qwen35moe", 48, False)],
)
def test_a_hybrid_family_gives_transformers_logits(name: str, width: int, deterministic: bool, tmp_path: Path) -> None:
    """Experts of width 32 beside a shared one of the same width, and of another."""
    model = row_model(name, shared_expert_intermediate_size=width)
    save_row(name, model, tmp_path)
    theirs = transformers_logits(model, random_prompt(LENGTH + 1))
    loaded, kernels = load_folder(tmp_path), TritonKernels("cpu", "f32", deterministic=deterministic)
    assert all(bool(layer.up.parts) == (width != 32) for layer in prepare(loaded.weights, kernels).layers)
    assert worst_chunks(loaded, theirs, (7,), 4, kernels) < TOLERANCE


def test_glm4moe_gives_transformers_logits() -> None:
    model, folder = tiny_model("glm4moe")
    theirs = transformers_logits(model, random_prompt(LENGTH + 1))
    loaded, kernels = load_folder(folder), TritonKernels("cpu", "f32")
    assert [bool(layer.up.parts) for layer in prepare(loaded.weights, kernels).layers] == [True, False, False]
    assert worst_chunks(loaded, theirs, (7,), 4, kernels) < TOLERANCE


class Computed(TorchDispatchMode):
    """Notes operations of torch that a GPU would launch a kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in str(func):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    """The names of all kernels that are launched inside; none of them runs."""
    found: list[str] = []

    def note(self: Any, *args: Any, **options: Any) -> None:
        found.append(self.fn.__name__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", note)
        yield found


@pytest.mark.parametrize(("tokens", "count"), [(1, 4), (5, 7)])
def test_a_layer_of_experts_is_a_few_launches_and_none_of_torch(tokens: int, count: int) -> None:
    """One token: router, choice and two products, with the norm and the residual in them."""
    kernels, (config, layer) = TritonKernels("cpu", "f32"), new_layer("gate")
    prepared, norm = prepare_layer(layer, kernels), kernels.prepare_norm(NORM)
    residual = torch.from_numpy(inputs(tokens))
    with counted_launches() as launches, Computed() as computed:
        normed = kernels.norm(residual, norm)
        kinds = config.activation, config.gated_mlp
        kernels.add(residual, feed_forward(prepared, normed, *kinds, NO_TOKENS, kernels, residual))
    assert computed.names == []
    assert len(launches) == count
