"""Attention over latents of released models compiles for a GPU that is not here, and fits in its shared memory."""

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
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bifolio.kernels.interface import AttentionShape
from bifolio.kernels.triton import latent_attention
from bifolio.kernels.triton.latents import MOST_ROWS, latent_sizes, latent_tile
from bifolio.kernels.triton.prefill import fixed_rows, tile_rows

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 232448  # bytes that a program may have there
NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float8_e4m3fn: "*fp8e4nv"}
NUMBERS = ("query_stride", "table_stride", "splits", "piece_length", "joins", "queries")


def compiled(kernel: Any, kinds: dict[str, str], constants: dict[str, Any], warps: int, stages: int) -> Any:
    given = {**kinds, "scale": "fp32", "mixed_parts": "*fp32", "weight_parts": "*fp32", **dict.fromkeys(NUMBERS, "i32")}
    signature = {a: "constexpr" if a in constants else given.get(a, "*i32") for a in kernel.arg_names}
    aligned = [a for a in ("query", "keys", "mixed_parts", "out") if a in kernel.arg_names]
    attributes = {(kernel.arg_names.index(a),): [["tt.divisibility", 16]] for a in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": stages})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["decode", "prompt", "fixed"])
@pytest.mark.parametrize("heads", [16, 20, 32, 64, 128])
def test_latents_fit_in_shared_memory(heads: int, kind: str, cache: torch.dtype) -> None:
    own = cache if cache.itemsize > 1 else torch.bfloat16
    tile = latent_tile(heads if kind == "decode" else MOST_ROWS, own)
    constants = {
        "HEADS": heads, **latent_sizes(576), "ROWS": tile.rows, "BLOCK_SIZE": 64, "TILE": tile.positions,
        "STAGES": tile.stages, "PRECISION": "ieee", "PLANNED": kind == "decode", "FIXED": kind == "fixed",
        "LEAST": latent_attention.LEAST_PIECE,
    }  # fmt: skip
    kinds = {"query": NAMES[own], "out": NAMES[own], "keys": NAMES[cache]}
    found = compiled(latent_attention._latent_kernel, kinds, constants, tile.warps, tile.stages)
    assert found.metadata.shared <= SHARED_MEMORY
    if tile.rows == MOST_ROWS and cache == torch.bfloat16:
        assert "wgmma" in found.asm["ptx"]
        assert "cp.async.cg" in found.asm["ptx"]


@pytest.mark.parametrize(("planned", "merged"), [(True, latent_attention.MERGED), (False, 1)])
def test_merging_compiles(planned: bool, merged: int) -> None:
    constants = {"HEADS": 20, "DIM": 576, "CHUNK": 128, "PLANNED": planned, "MERGED": merged}
    assert "ptx" in compiled(latent_attention._merge_kernel, {"out": "*bf16"}, constants, 4, 3).asm


def test_rows_of_huge_heads_without_a_cache() -> None:
    """Tiles of prefill attention with more rows would not fit."""
    shape = AttentionShape(0, 16, 1, 576, 1.0)
    for dtype, most in ((torch.bfloat16, 32), (torch.float32, 16)):
        for count in (1, 17, 64, 500):
            assert tile_rows(dtype, shape, count) <= most
            assert fixed_rows(dtype, shape, count) == most
