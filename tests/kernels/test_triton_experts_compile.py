"""Kernels of experts compile for a GPU that is not here, with the tiles of well-known shapes."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter is on, which compiles nothing", allow_module_level=True)

import torch
import triton
from test_triton_compiles import HOPPER, SHARED_MEMORY
from triton.compiler import ASTSource

from bifolio.kernels.triton import expert_choice, expert_kernels, expert_order, expert_words, experts, mxfp4
from bifolio.kernels.triton.row_layouts import LAYOUTS
from bifolio.quant.formats import QuantFormat

pytestmark = pytest.mark.full
DENSE, ROWS, MXFP4 = -1, 0, 3
SIZES = {
    DENSE: {"TOP_K": 8, "DEPTH": 2048, **experts.NO_LAYOUT},  # Qwen3-30B-A3B
    ROWS: {"TOP_K": 8, "DEPTH": 2048, **LAYOUTS[QuantFormat.Q6_K].constants(2048)},
    MXFP4: {"TOP_K": 4, "DEPTH": 2880, **experts.NO_LAYOUT},  # gpt-oss-20b
}
SILU, CLAMPED = 0, 4
POINTERS = {
    "x": "*bf16", "bias": "*bf16", "norm_weight": "*bf16", "shares": "*fp32", "residual": "*fp32", "out": "*bf16",
    "parts": "*fp32", "logits": "*bf16", "weights": "*fp32", "scale": "fp32", "eps": "fp32",
}  # fmt: skip
NUMBERS = {"num_outputs", "num_experts", "num_pairs", "num_tiles", "num_columns", "num_rows", "rows", "stride"}


def compiled(kernel: Any, constants: dict[str, Any], warps: int, stages: int = 3, **kinds: str) -> Any:
    stored = {DENSE: ("*bf16",) * 3, ROWS: ("*i32", "*fp16", "*u8"), MXFP4: ("*i32", "*u8", "*u8")}
    arrays = zip(("weight", "halves", "bytes"), stored[constants.get("KIND", DENSE)], strict=True)
    known = {**POINTERS, **dict(arrays), **kinds}
    signature = {
        name: "constexpr" if name in constants else "i32" if name in NUMBERS else known.get(name, "*i32")
        for name in kernel.arg_names
    }
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(ASTSource(kernel, signature, constants), target=HOPPER, options=options)


@pytest.mark.parametrize("kind", [DENSE, ROWS])
def test_products_of_one_token_compile(kind: int) -> None:
    for kernel, choose in (
        (expert_kernels.up_kernel, experts.up_tile),
        (expert_kernels.down_kernel, experts.down_tile),
    ):
        tile = choose(kind, SIZES[kind]["DEPTH"])
        constants = {
            **SIZES[kind], "KIND": kind, "OUTPUTS": tile.outputs, "BLOCK": tile.depth, "HAS_BIAS": False,
            "STAGES": tile.stages,
        }  # fmt: skip
        if kernel is expert_kernels.up_kernel:
            constants |= {"HAS_NORM": True, "ACTIVATION": SILU, "GATED": True}
        else:
            constants |= {"HAS_RESIDUAL": True, "CHOICES": SIZES[kind]["TOP_K"]}
        assert "ptx" in compiled(kernel, constants, tile.warps).asm


def test_products_of_one_token_and_words_compile() -> None:
    kinds = {"words": "*i32", "scales": "*u8", "x": "*fp32", "out": "*fp32"}
    depth, top_k = SIZES[MXFP4]["DEPTH"], SIZES[MXFP4]["TOP_K"]
    spread = {"DEPTH": depth, "BLOCK": 4096, "HAS_NORM": True}
    assert "ptx" in compiled(expert_words.spread_kernel, spread, 8, **kinds).asm
    tile = experts.up_tile(MXFP4, depth)
    sizes = {"DEPTH": depth, "TOP_K": top_k, "BLOCKS": tile.depth // 32, "UNROLLED": tile.stages, "HAS_BIAS": True}
    up = {**sizes, "NEXT_DEPTH": depth, "OUTPUTS": tile.outputs, "ACTIVATION": CLAMPED}
    assert "ptx" in compiled(expert_words.up_words_kernel, up, tile.warps, **kinds).asm
    tile = experts.down_tile(MXFP4, depth)
    down = {**sizes, "UNROLLED": tile.stages, "CHOICES": top_k, "HAS_RESIDUAL": True}
    assert "ptx" in compiled(expert_words.down_words_kernel, down, tile.warps, **kinds).asm


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize(("first", "gated"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("kind", SIZES)
def test_grouped_products_use_tensor_cores_and_fit(kind: int, first: bool, gated: bool, rows: int) -> None:
    tile = experts.grouped_tile(kind, rows, gated, torch.bfloat16)
    constants = {
        **SIZES[kind], "KIND": kind, "FIRST": first, "GATED": gated, "ACTIVATION": SILU if first else -1,
        "HAS_BIAS": kind == MXFP4, "ROWS": rows, "OUTPUTS": tile.outputs, "BLOCK": tile.depth, "STAGES": tile.stages,
        "DESCRIBED": kind == DENSE, "PRECISION": "tf32",
    }  # fmt: skip
    kinds = {"weight": f"tensordesc<bf16[{tile.outputs}, {tile.depth}]>"} if kind == DENSE else {}
    binary = compiled(expert_kernels.grouped_kernel, constants, tile.warps, tile.stages, **kinds)
    assert "wgmma" in binary.asm["ptx"]
    assert ("cp.async.bulk.tensor" in binary.asm["ptx"]) == (kind == DENSE)
    assert binary.metadata.shared <= SHARED_MEMORY


def test_pairs_of_mxfp4_are_unpacked_by_instructions_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_kernels, "IS_POSSIBLE", triton.language.constexpr(True))
    tile = experts.grouped_tile(MXFP4, 64, True, torch.bfloat16)
    constants = {
        **SIZES[MXFP4], "KIND": MXFP4, "GATED": True, "ACTIVATION": CLAMPED, "HAS_BIAS": True, "ROWS": 64,
        "OUTPUTS": tile.outputs, "BLOCK": tile.depth, "STAGES": tile.stages, "DESCRIBED": False, "PRECISION": "tf32",
    }  # fmt: skip
    kernel = triton.JITFunction(expert_kernels.grouped_kernel.fn)  # compiled with the patched constant
    assert "mul.bf16x2" in compiled(kernel, constants, tile.warps, tile.stages).asm["ptx"]


def test_routing_order_and_sum_compile() -> None:
    choice = {"TOP_K": 8, "RENORMALISE": True, "BLOCK": 128}
    for has_bias, shared, has_gate in ((False, False, False), (True, True, False), (False, True, True)):
        choice |= {"SIGMOID": has_bias, "HAS_BIAS": has_bias, "SHARED": shared, "SHARED_GATE": has_gate}
        assert "ptx" in compiled(expert_choice._route_kernel, choice, 1, bias="*fp32").asm
    order = {"BLOCK": expert_order.BLOCKS[-1], "BINS": 256, "FILLED": expert_order.FILLED}
    assert "ptx" in compiled(expert_order._order_kernel, order, 8).asm
    words = {"DEPTH": 2880, "ROWS": 8, "BLOCK": 1024}
    assert "ptx" in compiled(mxfp4._dequantise_kernel, words, 4, values="*i32", scales="*u8").asm
    total = {"TOP_K": 8, "BLOCK": 1024, "HAS_RESIDUAL": True}
    assert "ptx" in compiled(expert_kernels.sum_kernel, total, 4, out="*fp32").asm
