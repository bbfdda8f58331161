"""Models whose weights stay quantised, on the Triton kernels in the interpreter."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bifolio import LLM, SamplingParams
from bifolio.errors import ModelFileError
from bifolio.kernels.interface import Linear
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton.fp8 import Fp8Weight
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.kernels.triton.quantised import FEW_ROWS, FORMATS, MixedWeight, dequantise
from bifolio.kernels.triton.row_layouts import LAYOUTS, QuantisedWeight, pack
from bifolio.measure.random_models import random_model
from bifolio.model.gguf.loader import load_gguf
from bifolio.model.weight_rounding import rounded_model
from bifolio.model.weights import prepare
from bifolio.quant.convert import convert
from bifolio.quant.formats import QuantFormat
from bifolio.quant.fp8 import DenseToFp8, Fp8Tensor
from bifolio.quant.tensor import QuantizedTensor
from exotic_weights import exotic_tensor, k_quant_llama
from helpers import make_runner, open_entry, random_prompt, run_chunks, tiny_folder


def weights(format: str, outputs: int, depth: int, seed: int = 0) -> QuantizedTensor:
    values = np.random.default_rng(seed).standard_normal((outputs, depth)).astype(np.float32)
    return QuantizedTensor.quantize(values, QuantFormat.parse(format))


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q4_1"])
def test_a_model_gives_the_logits_of_its_dequantised_weights(format: str) -> None:
    model = random_model("tiny", format)
    tokens = random_prompt(9, seed=4, vocab_size=500)
    logits: list[np.ndarray] = []
    for kernels in (TorchKernels("cpu"), TritonKernels("cpu", "f32")):
        runner, blocks = make_runner(model, kernels=kernels)
        logits.append(run_chunks(runner, open_entry(runner, blocks), tokens, 8))  # eight rows, then one
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_file_of_k_quants_gives_the_logits_of_its_dequantised_weights(deterministic: bool, tmp_path: Path) -> None:
    """Queries and keys in Q4_K beside values in Q6_K; the embedding in Q6_K is the head."""
    model = load_gguf(k_quant_llama(tmp_path / "k.gguf", few_bits="Q4_K"))
    tokens, logits = random_prompt(9, seed=3, vocab_size=300), list[np.ndarray]()
    for kernels in (TorchKernels("cpu"), TritonKernels("cpu", "f32", deterministic=deterministic)):
        runner, blocks = make_runner(model, kernels=kernels)
        logits.append(run_chunks(runner, open_entry(runner, blocks), tokens, 8))  # eight rows, then one
    assert np.linalg.norm(logits[1] - logits[0]) < 1e-3 * np.linalg.norm(logits[0])


def test_weights_keep_their_bytes_and_tied_ones_lie_in_memory_once() -> None:
    model = random_model("tiny", "q4_0")
    prepared = prepare(model.weights, TritonKernels("cpu", "f32"))
    assert isinstance(prepared.embedding, QuantisedWeight)
    assert prepared.head.prepared[0] is prepared.embedding
    source: Any = model.weights.layers[0].up
    packed = prepared.layers[0].up.prepared[0]
    padding = 15 * packed.shape[0]  # regions begin at multiples of 16 bytes
    assert 0 <= packed.nbytes - sum(part.nbytes for part in source.parts) <= padding
    assert prepared.layers[0].up.out_features == source.out_features


def test_layers_of_a_dense_model_become_fp8() -> None:
    """Half of the bytes; head and embedding stay; logits are those of the rounded matrices."""
    model, kernels = random_model("tiny", "bf16"), TritonKernels("cpu", "f32")
    rounded = rounded_model(model, "fp8", kernels)
    assert rounded.digest() != model.digest()
    prepared = prepare(rounded.weights, kernels)
    assert isinstance(prepared.embedding, torch.Tensor)
    assert isinstance(prepared.head.prepared[0], torch.Tensor)
    dense: list[Any] = []
    for layer, source in zip(prepared.layers, model.weights.layers, strict=True):
        values: dict[str, Linear] = {}
        for name in ("qkv", "output", "up", "down"):
            weight, parts = getattr(layer, name).prepared[0], getattr(source, name).parts
            assert isinstance(weight, Fp8Weight)
            assert weight.values.numel() == sum(part.nbytes for part in parts) // 2
            rows = torch.split(weight.dense(torch.float32), [part.shape[0] for part in parts])
            for row, part in zip(rows, parts, strict=True):
                torch.testing.assert_close(row, torch.from_numpy(part.dequantize()), atol=0.01, rtol=0.07)
            arrays = tuple(QuantizedTensor.from_array(row.numpy()) for row in rows)
            values[name] = replace(getattr(source, name), parts=arrays)
        dense.append(replace(source, **values))
    expected = replace(model, weights=replace(model.weights, layers=tuple(dense)))
    tokens, logits = random_prompt(9, seed=4, vocab_size=500), list[np.ndarray]()
    for each, own in ((expected, TorchKernels("cpu")), (rounded, kernels)):
        runner, blocks = make_runner(each, kernels=own)
        logits.append(run_chunks(runner, open_entry(runner, blocks), tokens, 8))
    np.testing.assert_allclose(logits[1], logits[0], atol=2e-4, rtol=1e-4)


def test_values_that_are_no_numbers_are_refused_by_name() -> None:
    kernels = TritonKernels("cpu", "f32")
    broken = Fp8Tensor("mlp.weight", np.full((4, 32), 0x7F, np.uint8), np.ones((4, 1), np.float32), (1, 32), len)
    dense = QuantizedTensor(QuantFormat.BF16, np.full((4, 64), 0xFF, np.uint8), (4, 32), "mlp.weight")
    for part in (broken, DenseToFp8(dense)):
        with pytest.raises(ModelFileError, match=r"'mlp\.weight' contains values that are not numbers"):
            kernels.prepare_linear(Linear((part,), (None,)))


@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS + 1])
@pytest.mark.parametrize("extra", ["plain", "bias", "gated", "residual"])
def test_parts_of_different_formats_stay_as_they_are(rows: int, extra: str) -> None:
    """As in files of Q4_K_M: queries and keys in one format, values in another."""
    kernels, x, generator = TritonKernels("cpu", "f32"), torch.randn(rows, 512), np.random.default_rng(1)
    parts = tuple(exotic_tensor(name, 24, 512, seed) for seed, name in enumerate(("Q4_K", "Q4_K", "Q6_K", "Q8_0")))
    biases = tuple(generator.standard_normal(24).astype(np.float32) if extra == "bias" else None for _ in parts)
    linear = kernels.prepare_linear(Linear(parts, biases))
    weight = linear.prepared[0]
    assert isinstance(weight, MixedWeight)
    assert [part.format.name for part in weight.parts] == ["Q4_K", "Q6_K", "Q8_0"]
    y, expected = kernels.linear(x, linear), x @ torch.from_numpy(np.concatenate([p.dequantize() for p in parts])).T
    if extra == "bias":
        expected = expected + torch.from_numpy(np.concatenate(biases))
    if extra == "gated":
        y, expected = kernels.act_mul(y, "silu"), torch.nn.functional.silu(expected[:, :48]) * expected[:, 48:]
    if extra == "residual":
        residual = torch.randn(rows, 96)
        y, expected = kernels.add(residual, y), residual + expected
    torch.testing.assert_close(tensor(y), expected, atol=2e-3, rtol=2e-4)


def test_dense_parts_beside_quantised_ones_make_all_dense() -> None:
    kernels = TritonKernels("cpu", "f32")
    parts = (weights("q8_0", 8, 64), np.ones((8, 64), np.float32))
    linear = kernels.prepare_linear(Linear(parts, (None, None)))
    assert isinstance(linear.prepared[0], torch.Tensor)


@pytest.mark.parametrize("format", LAYOUTS)
def test_rows_hold_the_codes_of_the_file(format: QuantFormat) -> None:
    """Dequantised values are those of the file; head and embedding share one copy."""
    kernels, source = TritonKernels("cpu", "f32"), exotic_tensor(format.name, 24, 512)
    table = kernels.prepare_embedding(source)
    linear = kernels.prepare_linear(Linear((source,), (None,)))
    assert linear.prepared[0] is table
    assert table.format is format
    assert table.nbytes <= 24 * 512 * FORMATS.held_bits[format] / 8 + 24 * 48
    expected = torch.from_numpy(source.dequantize())
    torch.testing.assert_close(dequantise(table, torch.float32), expected, rtol=1e-6, atol=1e-7)


def test_blocks_with_equal_factors_become_one_group() -> None:
    values = np.random.default_rng(0).integers(-8, 8, (6, 512)).astype(np.float32)
    values[:, ::32] = -8
    for size, group in ((32, 32), (64, 64), (128, 128), (256, 128)):
        scales = np.repeat(2.0 ** -np.arange(512 // size), size).astype(np.float32)
        source = QuantizedTensor.quantize(values * scales, QuantFormat.Q4_0)
        weight = pack((source,), "cpu")
        assert weight.layout.group == group
        assert torch.equal(dequantise(weight, torch.float32), torch.from_numpy(source.dequantize()))


@pytest.mark.parametrize(("name", "kind"), [("Q5_0", QuantFormat.Q8_0), ("IQ2_XXS", QuantFormat.Q8_0)])
def test_formats_without_a_kernel_are_packed_as_the_nearest_that_has_one(name: str, kind: QuantFormat) -> None:
    kernels = TritonKernels("cpu", "f32")
    source = exotic_tensor(name, 24, 256)
    packed = kernels.prepare_linear(Linear((source,), (None,))).prepared[0]
    expected = pack((convert(source, kernels.formats),), "cpu")
    assert packed.format is kind
    assert torch.equal(packed.rows, expected.rows)


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
def test_deterministic_products_do_not_depend_on_the_number_of_rows(format: str) -> None:
    kernels = TritonKernels("cpu", "f32", deterministic=True)
    linear = kernels.prepare_linear(Linear((weights(format, 40, 96), weights(format, 40, 96, seed=1)), (None, None)))
    x = torch.randn(FEW_ROWS + 9, 96)
    together = kernels.act_mul(kernels.linear(x, linear), "silu")
    for row in (0, FEW_ROWS + 8):
        alone = kernels.act_mul(kernels.linear(x[row : row + 1], linear), "silu")
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("name", ["q8_0", "q4_0"])
def test_dense_models_are_rounded_to_blocks(name: str) -> None:
    """The matrices are held in blocks; tokens are those of torch on the same blocks."""
    folder, found = tiny_folder(hidden_size=64, intermediate_size=128), []
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    options: Any = {"quantization": name, "max_model_len": 64, "num_blocks": 40, "block_size": 4, "max_num_seqs": 2}
    for kernels in (TritonKernels("cpu", "f32"), TorchKernels("cpu")):
        with LLM(folder, kernels=kernels, **options) as llm:
            if kernels.name == "triton":
                assert isinstance(llm.engine.runner.weights.layers[0].up.prepared[0], QuantisedWeight)
            outputs = llm.generate([{"prompt_token_ids": random_prompt(9, vocab_size=61)}], params)
            found.append(outputs[0].outputs[0].token_ids)
    assert found[0] == found[1]
