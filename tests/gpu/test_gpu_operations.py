"""Every operation of the GPU's kernel sets against the reference: the cases of tests/kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from phase_checks import check_decode_needs_a_cache, check_phase_selects
from test_operations import test_operation_equals_the_reference, test_the_set_has_every_member_of_the_protocol

from bifolio.kernels.interface import AttentionPhase, KernelSet

__all__ = ["test_operation_equals_the_reference", "test_the_set_has_every_member_of_the_protocol"]
SETS: dict[str, dict[str, Any]] = {
    "f32": {"dtype": "f32"},
    "bf16": {"dtype": "bf16"},
    "bf16, deterministic": {"dtype": "bf16", "deterministic": True},
}


@pytest.fixture(scope="module", params=[*SETS, "torch, bf16"])
def kernels(request: pytest.FixtureRequest, device: str, compiled: None, gpu_kernels: Callable[..., Any]) -> KernelSet:
    if request.param in SETS:
        return gpu_kernels(**SETS[request.param])
    from bifolio.kernels.torch_reference import TorchKernels

    return TorchKernels(device, "bf16")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("phase", AttentionPhase)
def test_the_phase_selects_the_attention_kernel(
    phase: AttentionPhase, gpu_kernels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_phase_selects(gpu_kernels("f32"), phase, monkeypatch)


@pytest.mark.usefixtures("compiled")
def test_a_decode_segment_without_a_cache_is_an_error(gpu_kernels: Callable[..., Any]) -> None:
    check_decode_needs_a_cache(gpu_kernels("f32"))
