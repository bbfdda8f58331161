"""Every operation of the Triton kernels against the reference, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from latent_cases import by_head
from operation_cases import CASES, check_operation
from phase_checks import check_decode_needs_a_cache, check_phase_selects
from test_operations import test_the_set_has_every_member_of_the_protocol

from bifolio.kernels.interface import AttentionPhase, KernelSet
from bifolio.kernels.reference import ReferenceKernels
from bifolio.kernels.triton import TritonKernels

__all__ = ["test_the_set_has_every_member_of_the_protocol"]
SETS = {"f32": ("f32", False), "f16, deterministic": ("f16", True)}


@pytest.fixture(scope="module", params=SETS)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    dtype, deterministic = SETS[request.param]
    return TritonKernels("cpu", dtype, deterministic=deterministic)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_operation_equals_the_reference(name: str, kernels: KernelSet) -> None:
    check_operation(name, kernels)


@pytest.mark.parametrize("phase", AttentionPhase)
def test_the_phase_selects_the_attention_kernel(phase: AttentionPhase, monkeypatch: pytest.MonkeyPatch) -> None:
    check_phase_selects(TritonKernels("cpu", "f32"), phase, monkeypatch)


def test_a_decode_segment_without_a_cache_is_an_error() -> None:
    check_decode_needs_a_cache(TritonKernels("cpu", "f32"))


def test_products_by_head_take_the_residual_stream() -> None:
    """The stream is f32 between layers whatever the type of the weights; Gemma 3n multiplies it by head."""
    rng = np.random.default_rng(0)
    kernels, reference, heads = TritonKernels("cpu", "f16"), ReferenceKernels(), by_head(rng, 20, 24)
    x = rng.standard_normal((3, 4 * 24)).astype(np.float32)
    found = kernels.to_host(kernels.head_linear(kernels.from_host(x), kernels.prepare_head_linear(heads), 0))
    expected = reference.head_linear(x, reference.prepare_head_linear(heads), 0)
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)
