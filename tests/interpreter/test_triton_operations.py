"""Every operation of the Triton kernels against the reference, in the interpreter."""

from __future__ import annotations

import pytest
from phase_checks import check_decode_needs_a_cache, check_phase_selects
from test_operations import (
    test_operation_equals_the_reference,
    test_the_set_has_every_member_of_the_protocol,
)

from bifolio.kernels.interface import AttentionPhase, KernelSet
from bifolio.kernels.triton import TritonKernels

__all__ = ["test_operation_equals_the_reference", "test_the_set_has_every_member_of_the_protocol"]
SETS = {"f32": ("f32", False), "f16, deterministic": ("f16", True)}


@pytest.fixture(scope="module", params=SETS)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    dtype, deterministic = SETS[request.param]
    return TritonKernels("cpu", dtype, deterministic=deterministic)


@pytest.mark.parametrize("phase", AttentionPhase)
def test_the_phase_selects_the_attention_kernel(phase: AttentionPhase, monkeypatch: pytest.MonkeyPatch) -> None:
    check_phase_selects(TritonKernels("cpu", "f32"), phase, monkeypatch)


def test_a_decode_segment_without_a_cache_is_an_error() -> None:
    check_decode_needs_a_cache(TritonKernels("cpu", "f32"))
