"""Files in many formats: a kernel set takes them as they are or converts them, and keeps no copy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio import LLM
from bifolio.engine.memory import weight_bytes
from bifolio.kernels import native
from bifolio.kernels.interface import KernelSet, Linear
from bifolio.kernels.native import NativeKernels
from bifolio.kernels.native.formats import packed_bytes
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.weights import ModelWeights, prepare
from bifolio.quant.convert import convert
from bifolio.quant.formats import READABLE_FORMATS, QuantFormat
from bifolio.quant.mapped import mapping_of
from exotic_weights import exotic_tensor, k_quant_llama
from helpers import cpu_kernel_names, make_kernels, make_runner, open_entry, random_prompt, run_chunks


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def k_quants(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return k_quant_llama(tmp_path / "k.gguf", tied=request.param)


def converted_first(weights: ModelWeights, formats: frozenset[QuantFormat]) -> ModelWeights:
    """The weights that a kernel set would be given if files were converted before it sees them."""
    made: dict[int, Any] = {}

    def one(tensor: Any) -> Any:
        return made.setdefault(id(tensor), convert(tensor, formats))

    def linear(value: Linear) -> Linear:
        return replace(value, parts=tuple(one(part) for part in value.parts))

    layers = tuple(
        replace(layer, qkv=linear(layer.qkv), output=linear(layer.output), up=linear(layer.up), down=linear(layer.down))
        for layer in weights.layers
    )
    return replace(weights, embedding=one(weights.embedding), layers=layers, head=linear(weights.head))


def logits(weights: ModelWeights, path: Path, kernels: KernelSet) -> np.ndarray:
    model = replace(load_gguf(path), weights=weights)
    runner, blocks = make_runner(model, kernels=kernels)
    return run_chunks(runner, open_entry(runner, blocks), random_prompt(9, seed=3, vocab_size=300), 8)


def test_every_set_names_its_formats() -> None:
    for name in cpu_kernel_names():
        formats = make_kernels(name).formats
        whole = {QuantFormat[kind] for kind in ("F64", "I8", "I16", "I32", "I64")}
        assert formats == (READABLE_FORMATS - whole if name == "native" else READABLE_FORMATS)


def test_formats_survive_loading(k_quants: Path) -> None:
    weights = load_gguf(k_quants).weights
    layer = weights.layers[1]
    assert [part.format.name for part in layer.qkv.parts] == ["Q4_K", "Q4_K", "Q6_K"]
    assert [part.format.name for part in (*layer.up.parts, *layer.down.parts)] == ["Q4_K", "Q4_K", "Q5_0"]
    assert weights.embedding.format is QuantFormat.Q6_K
    assert not weights.embedding.data.flags.owndata  # a view of the file


@pytest.mark.full
@pytest.mark.parametrize("name", cpu_kernel_names())
def test_preparing_a_file_equals_preparing_what_it_converts_to(name: str, k_quants: Path) -> None:
    kernels = make_kernels(name)
    weights = load_gguf(k_quants).weights
    expected = logits(converted_first(weights, kernels.formats), k_quants, make_kernels(name))
    assert np.isfinite(expected).all()
    assert np.array_equal(logits(weights, k_quants, kernels), expected)


@pytest.mark.full
@pytest.mark.parametrize("name", cpu_kernel_names())
def test_all_sets_agree_on_a_file_of_k_quants(name: str, k_quants: Path) -> None:
    """The reference multiplies with floats; the native set rounds activations to bytes."""
    weights = load_gguf(k_quants).weights
    expected = logits(weights, k_quants, make_kernels("reference"))
    found = logits(weights, k_quants, make_kernels(name))
    assert np.linalg.norm(found - expected) <= (0.05 if name == "native" else 1e-4) * np.linalg.norm(expected)


def test_whole_numbers_and_doubles_are_multiplied_as_f32() -> None:
    tensor = exotic_tensor("F64", 7, 33)
    x = np.random.default_rng(0).standard_normal((2, 33)).astype(np.float32)
    for name in cpu_kernel_names():
        kernels = make_kernels(name)
        linear = kernels.prepare_linear(Linear((tensor,), (None,)))
        result = kernels.to_host(kernels.linear(kernels.from_host(x), linear))
        np.testing.assert_allclose(result, x @ tensor.dequantize().T, rtol=1e-4, atol=1e-4)


def test_native_weights_are_packed_from_the_file_without_a_copy(
    k_quants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_over: list[np.ndarray] = []

    def watched(tensor: Any, formats: frozenset[QuantFormat]) -> Any:
        result = convert(tensor, formats)
        assert result is tensor
        handed_over.append(result.data)
        return result

    monkeypatch.setattr(native.kernel_set, "convert", watched)
    model = load_gguf(k_quants)
    prepared = prepare(model.weights, NativeKernels(1))
    assert len(handed_over) >= len(model.weights.matrices())
    assert not any(data.flags.owndata for data in handed_over)
    assert all(mapping_of(data) is not None for data in handed_over)
    assert prepared.layers[0].up.out_features == 1024


def test_pages_that_were_packed_can_be_read_again(k_quants: Path) -> None:
    model = load_gguf(k_quants)
    before = [part.data.copy() for part in model.weights.layers[0].up.parts]
    kernels = NativeKernels(1)
    x = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)
    first = kernels.linear(x, kernels.prepare_linear(model.weights.layers[0].up))
    assert all(
        np.array_equal(part.data, old) for part, old in zip(model.weights.layers[0].up.parts, before, strict=True)
    )
    assert np.array_equal(kernels.linear(x, kernels.prepare_linear(model.weights.layers[0].up)), first)


def test_the_plan_counts_bytes_as_the_kernels_hold_them(k_quants: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_gguf(k_quants).weights
    as_held = sum(packed_bytes(native.library(), m.format, m.shape) for m in weights.matrices())  # type: ignore[union-attr]
    llm = LLM(k_quants, kernels="native", num_blocks=16, threads=1, verbose=True)
    assert llm.plan.weight_bytes == as_held > weight_bytes(weights)
    assert "convert" not in capsys.readouterr().err
    reference = LLM(k_quants, kernels="reference", num_blocks=16, verbose=True)
    assert reference.plan.weight_bytes == weight_bytes(weights)
    assert "convert" not in capsys.readouterr().err
