"""Kernels of low-rank adapters compile for a GPU that is not here, in each size of a tile and of the ranks."""

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

from bifolio.kernels.triton import adapters
from bifolio.kernels.triton.norm import ACTIVATIONS

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 232448  # bytes that a program may have there
DEPTH = 14336
POINTERS = {
    "x": "*bf16", "base": "*bf16", "y": "*bf16", "out": "*bf16", "thin": "*bf16", "partial_sums": "*fp32",
    "table": "*i64", "order": "*i32", "tiles": "*i32", "blocks": "*i32", "arrivals": "*i32",
}  # fmt: skip


def compiled(kernel: Any, constants: dict[str, Any], **types: str) -> Any:
    kinds = {**POINTERS, **types}
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    return triton.compile(source, target=HOPPER, options={"num_warps": 4, "num_stages": 2})


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("rows", [adapters.FEWEST_ROWS, adapters.MOST_ROWS])
def test_shrink_compiles(rows: int, width: int) -> None:
    plan = adapters.ProductPlan.of(0, (4096,), DEPTH, "cpu")
    constants = {
        "DEPTH": DEPTH, "SHARE": plan.share, "SPLITS": -(-DEPTH // plan.share), "BLOCK": plan.block(rows),
        "ROWS": rows, "RANKS": adapters.RANKS, "WIDTH": width, "PRECISION": "tf32",
    }  # fmt: skip
    found = compiled(adapters._shrink_kernel, constants)
    assert found.metadata.shared <= SHARED_MEMORY


@pytest.mark.sampled(4)
@pytest.mark.parametrize("activation", [adapters.NO_ACTIVATION, ACTIVATIONS["silu"]])
@pytest.mark.parametrize("rows", [adapters.FEWEST_ROWS, adapters.MOST_ROWS])
@pytest.mark.parametrize("values", ["*bf16", "*fp32"])  # y is f32 before an activation of deterministic mode
def test_expand_compiles(rows: int, activation: int, values: str) -> None:
    constants = {
        "ROWS": rows, "OUTPUTS": adapters.OUTPUTS, "RANKS": adapters.RANKS, "WIDTH": 32,
        "ACTIVATION": activation, "ALIGNED": True, "PRECISION": "tf32",
    }  # fmt: skip
    found = compiled(adapters._expand_kernel, constants, y=values)
    assert found.metadata.shared <= SHARED_MEMORY
