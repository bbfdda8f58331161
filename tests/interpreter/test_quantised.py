"""Models whose weights stay quantised, on the Triton kernels in the interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bifolio.kernels.interface import Linear
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import TritonKernels
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.kernels.triton.quantised import FEW_ROWS, QuantisedWeight, pack
from bifolio.measure.random_models import random_model
from bifolio.model.weights import prepare
from bifolio.quant.convert import convert
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from exotic_weights import exotic_tensor
from helpers import make_runner, open_entry, random_prompt, run_chunks


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


def test_weights_keep_their_bytes_and_tied_ones_lie_in_memory_once() -> None:
    model = random_model("tiny", "q4_0")
    prepared = prepare(model.weights, TritonKernels("cpu", "f32"))
    assert isinstance(prepared.embedding, QuantisedWeight)
    assert prepared.head.prepared[0] is prepared.embedding
    source: Any = model.weights.layers[0].up
    packed = prepared.layers[0].up.prepared[0]
    assert packed.nbytes == sum(part.nbytes for part in source.parts)
    assert prepared.layers[0].up.out_features == source.out_features


def test_parts_of_different_formats_are_dequantised() -> None:
    kernels = TritonKernels("cpu", "f32")
    parts = (weights("q8_0", 8, 64), weights("q4_0", 8, 64))
    linear = kernels.prepare_linear(Linear(parts, (None, None)))
    x = torch.randn(3, 64)
    expected = x.numpy() @ np.concatenate([part.dequantize() for part in parts]).T
    np.testing.assert_allclose(tensor(kernels.linear(x, linear)).numpy(), expected, atol=1e-4)


@pytest.mark.parametrize(("name", "kind"), [("Q4_K", QuantFormat.Q4_1), ("Q6_K", QuantFormat.Q8_0)])
def test_formats_without_a_kernel_are_packed_as_the_nearest_that_has_one(name: str, kind: QuantFormat) -> None:
    kernels = TritonKernels("cpu", "f32")
    source = exotic_tensor(name, 24, 256)
    expected = pack((convert(source, kernels.formats),), "cpu")
    table = kernels.prepare_embedding(source)
    linear = kernels.prepare_linear(Linear((source,), (None,)))
    assert linear.prepared[0] is table  # tied: one copy
    other = kernels.prepare_linear(Linear((exotic_tensor(name, 24, 256),), (None,))).prepared[0]
    for packed in (table, other):
        assert packed.format is kind
        assert torch.equal(packed.values, expected.values)
        assert torch.equal(packed.scales, expected.scales)


@pytest.mark.parametrize("format", ["q8_0", "q4_1"])
def test_deterministic_products_do_not_depend_on_the_number_of_rows(format: str) -> None:
    kernels = TritonKernels("cpu", "f32", deterministic=True)
    linear = kernels.prepare_linear(Linear((weights(format, 40, 96), weights(format, 40, 96, seed=1)), (None, None)))
    x = torch.randn(FEW_ROWS + 9, 96)
    together = kernels.act_mul(kernels.linear(x, linear), "silu")
    for row in (0, FEW_ROWS + 8):
        alone = kernels.act_mul(kernels.linear(x[row : row + 1], linear), "silu")
        assert torch.equal(alone[0], together[row])
