"""Norms, activations, embeddings and the rest of the verbs on every instruction set."""

from __future__ import annotations

import math

import numpy as np
import pytest
from native_support import isas, random_linear, settings

from bifolio.kernels import native
from bifolio.kernels.interface import Norm
from bifolio.kernels.reference import ReferenceKernels
from bifolio.quant.formats import ENCODABLE_FORMATS, QuantFormat
from bifolio.quant.tensor import QuantizedTensor

ISAS = isas()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 576, 1000])
def test_norms(isa: str, centered: bool, size: int) -> None:
    rng = np.random.default_rng(size)
    norm = Norm(
        rng.standard_normal(size).astype(np.float32),
        rng.standard_normal(size).astype(np.float32) if centered else None,
        1e-5,
        centered,
    )
    x, delta = rng.standard_normal((2, 9, size), np.float32)
    reference = ReferenceKernels()
    with settings(isa):
        kernels = native.NativeKernels()
        np.testing.assert_allclose(kernels.norm(x, norm), reference.norm(x, norm), rtol=2e-5, atol=2e-6)
        total, normed = kernels.add_norm(x, delta, norm)
    np.testing.assert_array_equal(total, x + delta)
    np.testing.assert_allclose(normed, reference.norm(x + delta, norm), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu2"])
def test_activations(isa: str, activation: str) -> None:
    special = [0.0, -0.0, 1e-20, -1e-20, 1e-3, 88.0, -88.0, 200.0, -200.0, 1e30, -1e30]
    x = np.concatenate([np.linspace(-12, 12, 4001), special]).astype(np.float32)[None, :]
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = {
            "silu": wide / (1 + np.exp(-wide)),
            "gelu_tanh": 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3))),
            "gelu": 0.5 * wide * (1 + np.vectorize(math.erf)(wide / np.sqrt(2))),
            "relu2": (np.maximum(wide, 0) ** 2).astype(np.float32),
        }[activation]
    with settings(isa):
        kernels = native.NativeKernels()
        result = kernels.act(x, activation)
        gated = kernels.act_mul(np.concatenate([x, x[:, ::-1]], axis=1), activation)
    np.testing.assert_allclose(result, expected, rtol=3e-6, atol=2e-6)
    np.testing.assert_allclose(gated, result * x[:, ::-1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_activations_pass_nan_on(isa: str) -> None:
    x = np.full((1, 20), np.nan, np.float32)
    with settings(isa):
        assert np.isnan(native.NativeKernels().act(x, "silu")).all()


@pytest.mark.parametrize("format", ENCODABLE_FORMATS)
def test_embedding_rows(format: QuantFormat) -> None:
    rng = np.random.default_rng(1)
    table = QuantizedTensor.quantize(rng.standard_normal((50, 64)), format)
    ids = np.array([3, 49, 0, 3], np.int32)
    kernels = native.NativeKernels()
    result = kernels.embed(kernels.prepare_embedding(table), ids, 2.0)
    np.testing.assert_array_equal(result, ReferenceKernels().embed(table, ids, 2.0))
    with pytest.raises(ValueError, match="outside"):
        kernels.embed(kernels.prepare_embedding(table), np.array([50], np.int32), 1.0)


def test_rotation_at_far_positions() -> None:
    frequencies = (1 / 10000 ** (np.arange(16) / 16)).astype(np.float32)
    positions = np.array([0, 1, 511, 131071], np.int32)
    result = native.NativeKernels().rotation(frequencies, 1.2, positions)
    expected = ReferenceKernels().rotation(frequencies, 1.2, positions)
    np.testing.assert_allclose(result.cos, expected.cos, atol=2e-6)
    np.testing.assert_allclose(result.sin, expected.sin, atol=2e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_logits_with_a_soft_cap(isa: str) -> None:
    rng = np.random.default_rng(3)
    head = random_linear(rng, [33], 20, QuantFormat.F32)
    x = rng.standard_normal((2, 20), np.float32) * 10
    with settings(isa):
        result = native.NativeKernels().logits(x, head, 30.0)
    np.testing.assert_allclose(result, ReferenceKernels().logits(x, head, 30.0), rtol=1e-4, atol=1e-3)


def test_threads_can_be_set() -> None:
    with settings(threads=3):
        assert native.num_threads() == 3
    assert native.num_threads() >= 1
