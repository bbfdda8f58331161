"""Kernels that filter and draw tokens compile for a GPU that is not here."""

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
from test_triton_compiles import HOPPER, SHARED_MEMORY
from triton.compiler import ASTSource

from bifolio.kernels.triton import filters, rare_filters, selection

POINTERS = {
    **dict.fromkeys(("logits", "best_value", "best_of_groups", "warmths", "bracket", "list_values"), "*fp32"),
    **dict.fromkeys(("rows", "top_ks", "lengths", "list_lengths", "list_starts", "list_ids", "drawn"), "*i32"),
    **dict.fromkeys(("top_ps", "rare_options"), "*fp64"),
    **dict.fromkeys(("min_weights", "seeds", "sums"), "*i64"),
}
CHUNKS = {"CHUNK": 4096, "CHUNKS": 32}
BRACKET = {"GROUP": 64, "GROUPS": 2048, "CHUNKS": 32, "SAMPLE": 16384, "FEWEST": 1500, "MOST": 3500}
CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "bracket": (filters._bracket_kernel, BRACKET, 8),
    "divide": (filters._divide_kernel, {**CHUNKS, "ROOM": 1024}, 8),
    "draw": (selection.draw_kernel, {**CHUNKS, "LIST": 8192, "ROOM": 1024}, 16),
    "redraw": (selection.redraw_kernel, CHUNKS, 16),
    "typical and XTC": (rare_filters._draw_rare_kernel, CHUNKS, 16),
}


LONG = ("draw", "redraw", "typical and XTC")  # the compiler takes ten seconds or more


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else pytest.mark.full) for n in CASES]
)
def test_kernel_compiles_for_a_gpu(name: str) -> None:
    kernel, constants, warps = CASES[name]
    signature = {a: "constexpr" if a in constants else POINTERS.get(a, "i32") for a in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps, "enable_fp_fusion": False})
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert "fma.rn.f32" not in compiled.asm["ptx"]  # weights are defined by single operations
