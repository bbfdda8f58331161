"""Every Triton kernel against the reference, in the interpreter."""

from __future__ import annotations

import pytest

from bifolio.kernels.triton import TritonKernels
from bifolio.measure.kernel_checks import Check, all_checks

# The interpreter multiplies the bits of bf16 matrices, not their values; f16 takes the same paths through the kernels.
CHECKS = [check for dtype in ("f32", "f16") for check in all_checks(TritonKernels("cpu", dtype))]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_kernel(check: Check) -> None:
    assert check.error() < check.tolerance


def test_descriptions_are_tried() -> None:
    """Were they thought impossible here, their checks would be left out without a word."""
    assert sum("described" in check.name for check in CHECKS) == 30
