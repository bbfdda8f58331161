"""Kernels over quantised weights compile for a GPU that is not here."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter is on, which compiles nothing", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bifolio.kernels.triton.quantised_kernels import dequantise_kernel, few_rows_kernel, one_row_kernel

HOPPER = GPUTarget("cuda", 90, 32)
KINDS = {
    "x": "*bf16", "scales": "*fp16", "minima": "*fp16", "norm_weight": "*fp32", "bias": "*bf16", "residual": "*fp32",
    "out": "*fp32", "rows": "*i32", "num_outputs": "i32", "num_rows": "i32", "x_stride": "i32", "eps": "fp32",
    "factor": "fp32",
}  # fmt: skip
SHARED = {"DEPTH": 2048, "HAS_BIAS": True, "HAS_RESIDUAL": True}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "one row": (one_row_kernel, {**SHARED, "OUTPUTS": 4, "BLOCKS": 64, "STAGES": 1, "HAS_NORM": True, "ACTIVATION": 0}),
    "few rows": (
        few_rows_kernel,
        {**SHARED, "ROWS": 64, "OUTPUTS": 64, "BLOCKS": 4, "STAGES": 4, "ACTIVATION": -1, "PRECISION": "tf32"},
    ),
    "dequantise": (dequantise_kernel, {"DEPTH": 2048, "BLOCKS": 64, "LOOKS_UP": True}),
}


@pytest.mark.parametrize("kind", [0, 2], ids=["q8_0", "q4_1"])
@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_for_a_gpu(name: str, kind: int) -> None:
    kernel, constants = CASES[name]
    constants = {**constants, "KIND": kind}
    kinds = {**KINDS, "values": "*u8" if kind else "*i8"}
    signature = {a: "constexpr" if a in constants else kinds[a] for a in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(kernel, signature, constants), target=HOPPER, options={"num_warps": 4, "num_stages": 4}
    )
    assert "wgmma" in compiled.asm["ptx"] or name != "few rows"
