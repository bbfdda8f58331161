"""Kernels of recurrent layers compile for a GPU that is not here, with the sizes of well-known models."""

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
from test_triton_compiles import HOPPER
from triton.compiler import ASTSource

from bifolio.kernels.triton import device_state, recurrence

pytestmark = pytest.mark.full
POINTERS = {
    "x": "*bf16", "windows": "*fp32", "old": "*fp32", "weight": "*fp32", "bias": "*fp32", "mixed": "*fp32",
    "gates": "*bf16", "states": "*fp32", "decay": "*fp32", "skip": "*fp32", "y": "*fp32", "out": "*fp32",
    "query_scale": "fp32", "eps": "fp32", "least": "fp32", "most": "fp32",
    **dict.fromkeys(("sequences", "starts", "reads", "writes", "rows", "slot_reads", "slot_writes"), "*i32"),
}  # fmt: skip
CONVOLVE = {
    "WIDTH": 4, "GATED": False, "UNIT": True, "HAS_BIAS": False, "HAS_STATES": True, "TOKENS": 8, "BLOCK": 128,
}  # fmt: skip
SCAN = {
    "DELTA": True, "TILED": False, "HAS_SKIP": False, "HAS_STATES": True, "KEYS": 128, "VALUES": 16, "STAGES": 3,
}  # fmt: skip
FINISH = {"HAS_NORM": True, "NORM_FIRST": True, "SHARED": True, "ROWS": 16, "BLOCK": 128}
CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "convolution of qwen3_next": (recurrence._convolve_kernel, CONVOLVE, 4),
    "convolution of lfm2": (
        recurrence._convolve_kernel,
        {**CONVOLVE, "WIDTH": 3, "GATED": True, "UNIT": False, "TOKENS": 4, "BLOCK": 256},
        4,
    ),
    "scan of qwen3_next": (recurrence._scan_kernel, SCAN, 1),
    "scan of granite": (recurrence._scan_kernel, {**SCAN, "DELTA": False, "HAS_SKIP": True}, 1),
    "norm of qwen3_next": (recurrence._finish_kernel, FINISH, 4),
    "norm of granite": (
        recurrence._finish_kernel, {**FINISH, "NORM_FIRST": False, "SHARED": False, "ROWS": 1, "BLOCK": 8192}, 8,
    ),
    "states of a step": (device_state._begin_states_kernel, {"BLOCK": 64}, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_for_a_gpu(name: str) -> None:
    kernel, constants, warps = CASES[name]
    signature = {a: "constexpr" if a in constants else POINTERS.get(a, "i32") for a in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": 3})
    assert "ptx" in compiled.asm
    if kernel is recurrence._scan_kernel:
        assert "ld.local" not in compiled.asm["ptx"]  # the state stays in registers
        assert "cp.async" in compiled.asm["ptx"]  # the next tokens are read ahead
