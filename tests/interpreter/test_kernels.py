"""Every Triton kernel against torch in float32, in the interpreter: the small shapes of the GPU's checks."""

from __future__ import annotations

import pytest
from check_bench import Check
from kernel_checks import CHECKS

from bifolio.kernels.triton import TritonKernels

# The interpreter multiplies the bits of bf16 matrices, not their values; f16 takes the same paths through the kernels.
# Both types of a check are neighbours, of which a run takes one.
CASES = [
    pytest.param(dtype, check, id=f"{dtype} {check.name}")
    for check in sorted(CHECKS, key=lambda check: check.narrow)
    for dtype in ("f32", "f16")
    if not (check.large or (check.narrow and dtype == "f32"))
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "check"), CASES)
def test_kernel(dtype: str, check: Check) -> None:
    check.run(TritonKernels("cpu", dtype))


def test_the_interpreter_has_a_copy_engine() -> None:
    """Without one, the checks of TMA would be skipped."""
    import torch

    from bifolio.kernels.triton.tma import can_be_described

    assert can_be_described(torch.zeros(16, 16, dtype=torch.float16))
