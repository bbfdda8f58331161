"""Every kernel of the GPU against torch in float32: all shapes of `kernel_checks`, in bf16 and in f32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

from check_bench import Check
from kernel_checks import CHECKS

CASES = [
    pytest.param(dtype, check, id=f"{dtype} {check.name}")
    for dtype in ("bf16", "f32")
    for check in CHECKS
    if not (check.narrow and dtype == "f32")
]


@pytest.mark.usefixtures("own_kernels", "compiled")
@pytest.mark.parametrize(("dtype", "check"), CASES)
def test_kernel(dtype: str, check: Check, gpu_kernels: Callable[..., Any]) -> None:
    check.run(gpu_kernels(dtype))
