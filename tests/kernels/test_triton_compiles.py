"""Triton kernels compile for a GPU that is not here: what the interpreter accepts, the compiler may not."""

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

from bifolio.kernels.triton import (
    cache,
    chosen_attention,
    decode,
    device_state,
    fp8_rows,
    gemm_small_m,
    gemm_tuning,
    gemv,
    head_products,
    index_scores,
    long_attention,
    lookup,
    norm,
    prefill,
    quantised_kernels,
    quantised_rows,
    row_layouts,
    sampling,
    shared_attention,
    split_kv,
    top_positions,
)
from bifolio.kernels.triton.adapter_changes import PIECES

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 232448  # bytes that a program may have there
INTEGERS = {
    "window",
    "num_sequences",
    "most",
    "extra",
    "query_stride",
    "key_stride",
    "value_stride",
    "table_stride",
    "qkv_stride",
    "x_stride",
    "delta_stride",
    "logit_stride",
    "width",
    "weight_stride",
    "num_columns",
    "num_rows",
    "num_outputs",
    "out_stride",
    "vocab",
    "num_chunks",
    "num_tokens",
    "context",
}
FLOATS = {"scale", "eps"}
WIDE = {
    "mixed_parts",
    "weight_parts",
    "shared_mixed",
    "shared_weight",
    "partial_sums",
    "logits",
    "best_value",
    "cos",
    "sin",
    "temperature",
    "total",
    "sinks",
    "slopes",
    "biases",
    "ranked",
}
LONG = {"slots", "places", "sums", "seeds"}
NARROW = {
    "query",
    "keys",
    "values",
    "x",
    "weight",
    "weights",
    "bias",
    "residual",
    "norm_weight",
    "delta",
    "qkv",
    "query_norm",
    "key_norm",
    "turned",
    "table",
    "out",
}


def kind(name: str) -> str:
    for names, text in ((INTEGERS, "i32"), (FLOATS, "fp32"), (WIDE, "*fp32"), (LONG, "*i64"), (NARROW, "*bf16")):
        if name in names:
            return text
    return "*i32"


HEADS = {"KV_HEADS": 8, "GROUP": 4, "DIM": 128, "DIM_BLOCK": 128, "BLOCK_SIZE": 64, "TILE": 64, "PRECISION": "tf32"}
HEADS["CAP"] = 0.0
DECODE = {
    **HEADS, "HEADS": 32, "ROWS": 16, "STAGES": 4, "SHARED_ROWS": 0, "FIXED": 0, "JOINED": 16, "GROUP_BLOCK": 4,
    "HAS_SINKS": False, "HAS_SLOPES": False,
}  # fmt: skip
CUT = {"IS_SHARED": True, "TILE": 64, "FIXED": 0, "BLOCK": 256, "ITEMS": 256, "OTHERS": 32}
PREFILL = {
    **{k: v for k, v in HEADS.items() if k != "GROUP"},
    "HEADS": 32, "ROWS": 16, "WINDOW": 0, "FRESH": False, "FIXED": 0, "HAS_SINKS": False,
    "HAS_SLOPES": False, "BIDIRECTIONAL": False, "COLUMNS": 0,
}  # fmt: skip
PRODUCT = {"DEPTH": 4096, "HAS_BIAS": False, "HAS_RESIDUAL": True, "ACTIVATION": -1}
FEW = {
    "ROWS": 64, "OUTPUTS": 64, "BLOCK": 128, "STAGES": 4, "SWAPPED": True, "PRECISION": "tf32", "DESCRIBED": False,
    "X_DESCRIBED": False, "GROUP": 0, "X_SCALED": False, "WIDTH": 0, "PIECES": PIECES,
}  # fmt: skip
CHANGED = {
    "thin": "*bf16",
    "base": "*bf16",
    "table": "*i64",
    "first_entry": "i32",
    "num_entries": "i32",
}  # of products with the changes of adapters
CHOSEN = {
    "HEADS": 128, "ROWS": 64, "DIM": 576, "FIRST": 64, "FIRST_BLOCK": 64, "LAST_BLOCK": 512, "TOP_K": 2048,
    "BLOCK_SIZE": 64, "TILE": 32, "STAGES": 3, "PRECISION": "ieee",
}  # fmt: skip
CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "decode": (decode._decode_kernel, DECODE, 2),
    "decode, shared": (decode._decode_kernel, {**DECODE, "SHARED_ROWS": 128}, 2),
    "decode, deterministic": (
        decode._decode_kernel,
        {**DECODE, "ROWS": 64, "FIXED": 1024, "JOINED": 1, "GROUP_BLOCK": 64},
        4,
    ),
    "decode, soft-capped": (decode._decode_kernel, {**DECODE, "CAP": 72.0}, 2),
    "decode, biased": (decode._decode_kernel, {**DECODE, "HAS_SLOPES": True}, 2),
    "cut": (split_kv._cut_kernel, CUT, 8),
    "cut, deterministic": (split_kv._cut_kernel, {**CUT, "IS_SHARED": False, "FIXED": 1024}, 8),
    "shared": (shared_attention._shared_kernel, {**HEADS, "ROWS": 128, "STAGES": 3}, 8),
    "prefill": (prefill._prefill_kernel, PREFILL, 4),
    "prefill, deterministic": (prefill._prefill_kernel, {**PREFILL, "ROWS": 128, "FIXED": 1024}, 8),
    "prefill, biased": (prefill._prefill_kernel, {**PREFILL, "ROWS": 128, "HAS_SLOPES": True}, 8),
    "prefill, both ways": (
        prefill._prefill_kernel,
        {**PREFILL, "ROWS": 128, "FRESH": True, "BIDIRECTIONAL": True, "COLUMNS": 257},
        8,
    ),
    "prefill, in chunks": (prefill._prefill_kernel, {**PREFILL, "ROWS": 128, "WINDOW": -8192}, 8),
    "prefill, in odd chunks": (prefill._prefill_kernel, {**PREFILL, "WINDOW": -20, "FRESH": True}, 4),
    "one row": (
        gemv._one_row_kernel,
        {**PRODUCT, "OUTPUTS": 4, "BLOCK": 1024, "STAGES": 1, "HAS_NORM": True, "GROUP": 0},
        4,
    ),
    "few rows": (gemm_small_m._few_rows_kernel, {**PRODUCT, **FEW, "SPLITS": 1}, 4),
    "few rows, split": (gemm_small_m._few_rows_kernel, {**PRODUCT, **FEW, "SPLITS": 4}, 4),
    "few rows, changes": (gemm_small_m._few_rows_kernel, {**PRODUCT, **FEW, "SPLITS": 2, "WIDTH": 32}, 4),
    "few rows, gated": (gemm_small_m._few_rows_kernel, {**PRODUCT, **FEW, "SPLITS": 2, "ACTIVATION": 0}, 4),
    "gate": (norm._gate_kernel, {"SIZE": 1, "BLOCK": 1024}, 4),
    "gate of heads": (norm._gate_kernel, {"SIZE": 128, "BLOCK": 1024}, 4),
    "norm": (norm._norm_kernel, {"HAS_DELTA": True, "HAS_BIAS": False, "CENTERED": False, "BLOCK": 4096}, 8),
    "rope": (
        cache._rope_write_kernel,
        {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "DIM_BLOCK": 128, "ROTATED": 128, "INTERLEAVED": False,
         "HAS_NORM": True, "ALL_HEADS": False, "NORM_AFTER": False, "HAS_VALUE_NORM": False,
         "HAS_CACHE": True, "BLOCK_SIZE": 64, "TILE": 8},
        4,
    ),
    "rope, norms of all heads": (
        cache._rope_write_kernel,
        {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "DIM_BLOCK": 128, "ROTATED": 128, "INTERLEAVED": False,
         "HAS_NORM": True, "ALL_HEADS": True, "NORM_AFTER": False, "HAS_VALUE_NORM": False,
         "HAS_CACHE": True, "BLOCK_SIZE": 64, "TILE": 8},
        4,
    ),
    "rope, norms afterwards": (
        cache._rope_write_kernel,
        {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "DIM_BLOCK": 128, "ROTATED": 64, "INTERLEAVED": False,
         "HAS_NORM": True, "ALL_HEADS": False, "NORM_AFTER": True, "HAS_VALUE_NORM": False,
         "HAS_CACHE": True, "BLOCK_SIZE": 64, "TILE": 8},
        4,
    ),
    "rope, normed values of large heads": (
        cache._rope_write_kernel,
        {"HEADS": 32, "KV_HEADS": 4, "DIM": 512, "DIM_BLOCK": 512, "ROTATED": 512, "INTERLEAVED": False,
         "HAS_NORM": True, "ALL_HEADS": False, "NORM_AFTER": False, "HAS_VALUE_NORM": True,
         "HAS_CACHE": True, "BLOCK_SIZE": 64, "TILE": 8},
        8,
    ),
    "begin": (device_state._begin_step_kernel, {"TURNS": 4, "BLOCK_SIZE": 64, "BLOCK": 64}, 1),
    "embed": (lookup._embed_kernel, {"BLOCK": 1024}, 4),
    "index scores": (
        index_scores._index_kernel,
        {"LEAST": 2048, "HEADS": 32, "ROWS": 32, "DIM": 128, "DIM_BLOCK": 128, "BLOCK_SIZE": 64, "TILE": 64,
         "PRECISION": "ieee"},
        4,
    ),
    "top positions": (top_positions._top_kernel, {"TOP_K": 2048, "BLOCK": 4096}, 16),
    "chosen": (chosen_attention._chosen_kernel, {**CHOSEN, "PIECE": 2048, "SPLITS": 1}, 8),
    "chosen, in pieces": (chosen_attention._chosen_kernel, {**CHOSEN, "PIECE": 256, "SPLITS": 8}, 8),
    "chosen, few heads": (
        chosen_attention._chosen_kernel,
        {**CHOSEN, "HEADS": 16, "ROWS": 16, "TILE": 32, "PIECE": 512, "SPLITS": 4},
        4,
    ),
    "products of heads": (
        head_products._head_kernel,
        {"WIDTH": 576, "START": 64, "INPUTS": 512, "WIDE": 128, "ROWS": 32, "OUTPUTS": 64, "DEPTH": 32,
         "PRECISION": "ieee"},
        4,
    ),
    "merged pieces": (
        chosen_attention._merge_kernel,
        {"HEADS": 128, "DIM": 576, "DIM_BLOCK": 1024, "TOP_K": 2048, "PIECE": 256, "SPLITS": 8, "SPLITS_BLOCK": 8},
        4,
    ),
    "choose": (sampling._choose_kernel, {"DRAWS": True, "CHUNK": 4096, "CHUNKS": 32}, 8),
}  # fmt: skip


QUANTISED_TILES = {
    "few rows": {"ROWS": 64, "OUTPUTS": 128, "BLOCK": 128, "STAGES": 3, "SWAPPED": True, "SPLITS": 4},
    "few rows, gated": {
        "ROWS": 16,
        "OUTPUTS": 64,
        "BLOCK": 128,
        "STAGES": 3,
        "SWAPPED": False,
        "SPLITS": 2,
        "ACTIVATION": 0,
    },
    "few rows, odd": {
        "ROWS": 16,
        "OUTPUTS": 64,
        "BLOCK": 128,
        "STAGES": 3,
        "SWAPPED": False,
        "SPLITS": 1,
        "DEPTH": 4000,
    },
    "few rows, fixed": {"ROWS": 64, "OUTPUTS": 64, "BLOCK": 128, "STAGES": 4, "SWAPPED": True, "SPLITS": 1},
}
for format, layout in row_layouts.LAYOUTS.items():
    for name, tile in QUANTISED_TILES.items():
        depth = int(tile.get("DEPTH", 4096)) // 256 * 256
        own = {**PRODUCT, **tile, "DEPTH": depth, **layout.constants(depth), "PRECISION": "tf32"}
        CASES[f"{name} {format.name}"] = (quantised_rows.few_rows_kernel, own, 8)
    own = {"DEPTH": 4096, **layout.constants(4096), "OUTPUTS": 4, "BLOCK": 1024}
    CASES[f"one row {format.name}"] = (
        quantised_kernels.one_row_kernel, {**PRODUCT, **own, "HAS_NORM": True, "ACTIVATION": 0}, 4,
    )  # fmt: skip
    CASES[f"dequantise {format.name}"] = (quantised_kernels.dequantise_kernel, {**own, "LOOKS_UP": True}, 4)


for group in (128, 4096):  # columns of an FP8 weight that share a scale; all of a row have one
    fp8_row = {**PRODUCT, "OUTPUTS": 4, "BLOCK": 1024, "STAGES": 1, "HAS_NORM": True, "GROUP": group, "ACTIVATION": 0}
    CASES[f"one row FP8 {group}"] = (gemv._one_row_kernel, fp8_row, 4)
    CASES[f"few rows FP8 {group}"] = (gemm_small_m._few_rows_kernel, {**PRODUCT, **FEW, "SPLITS": 2, "GROUP": group}, 4)
    CASES[f"some rows FP8 {group}"] = (
        gemm_small_m._few_rows_kernel, {**PRODUCT, **FEW, "SPLITS": 2, "GROUP": group, "X_SCALED": True}, 4,
    )  # fmt: skip
for name in (
    "decode",
    "decode, shared",
    "shared",
    "prefill",
    "prefill, deterministic",
    "rope",
    "index scores",
    "chosen",
):
    CASES[f"{name}, FP8 cache"] = CASES[name]
CASES["gather, FP8 cache"] = (
    long_attention._gather_kernel, {"KV_HEADS": 8, "BLOCK_SIZE": 64, "DIM": 128, "DIM_BLOCK": 128, "TOKENS": 64}, 4,
)  # fmt: skip
CASES["rows in FP8"] = (
    fp8_rows._round_rows_kernel, {"DEPTH": 14336, "BLOCK": 16384, "LARGEST": 448.0, "SMALLEST": 1e-12}, 16,
)  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_for_a_gpu(name: str) -> None:
    kernel, constants, warps = CASES[name]
    kinds = {"words": "*i32", "halves": "*fp16", "bytes": "*u8", "factor": "fp32"}
    if "changes" in name:
        kinds = CHANGED
    elif "FP8 cache" in name:
        kinds = {"keys": "*fp8e4nv", "values": "*fp8e4nv"}
    elif "FP8" in name:
        kinds = {"values": "*fp8e4nv", "scales": "*fp32", "x_scales": "*fp32", "weight": "*fp8e4nv"}
        if name.startswith("some"):
            kinds["x"] = "*fp8e4nv"
    signature = {a: "constexpr" if a in constants else kinds.get(a, kind(a)) for a in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": 3})
    assert "ptx" in compiled.asm


def test_tiles_of_latents_fit_in_shared_memory() -> None:
    """Latents are fetched while others are multiplied, by whole warp groups."""
    kernel, constants, warps = CASES["chosen"]
    signature = {a: "constexpr" if a in constants else kind(a) for a in kernel.arg_names}
    attributes = {(kernel.arg_names.index(a),): [["tt.divisibility", 16]] for a in ("query", "keys", "out")}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": constants["STAGES"]})
    for instruction in ("cp.async.cg", "wgmma"):
        assert instruction in compiled.asm["ptx"]
    assert compiled.metadata.shared <= SHARED_MEMORY


def compiled_product(
    rows: int, outputs: int, depth: int, gated: bool, dtype: torch.dtype, *, x_described: bool, width: int = 0
) -> tuple[str, int]:
    """(PTX, bytes of shared memory) of a product in the tile that it gets in a large model."""
    tile = gemm_tuning.few_rows_tile(rows, outputs, depth, dtype, gated=gated, described=True)
    assert tile.described
    constants = {
        **PRODUCT, **FEW, "DEPTH": depth, "ROWS": min(triton.next_power_of_2(rows), tile.rows), "OUTPUTS": tile.outputs,
        "BLOCK": tile.depth, "STAGES": tile.stages, "SPLITS": tile.splits, "ACTIVATION": 0 if gated else -1,
        "DESCRIBED": True, "X_DESCRIBED": x_described, "SWAPPED": tile.swapped,
        "WIDTH": width,
    }  # fmt: skip
    kernel = gemm_small_m._few_rows_kernel
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    kinds = CHANGED if width else {}
    signature = {a: "constexpr" if a in constants else kinds.get(a, kind(a)) for a in kernel.arg_names}
    signature["x"] = f"tensordesc<{name}[{constants['ROWS']}, {tile.depth}]>" if x_described else f"*{name}"
    signature["weight"] = f"tensordesc<{name}[{tile.outputs}, {tile.depth}]>"
    aligned = (*(() if x_described else ("x", "x_stride")), *(("thin", "base", "table") if width else ()))
    attributes = {(kernel.arg_names.index(a),): [["tt.divisibility", 16]] for a in aligned}
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": tile.warps, "num_stages": tile.stages})
    return compiled.asm["ptx"], compiled.metadata.shared


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("rows", "outputs", "depth", "gated"),
    [
        (17, 14336, 4096, True), (64, 14336, 4096, True), (128, 14336, 4096, True), (100, 3072, 1024, True),
        (17, 4096, 14336, False), (64, 4096, 14336, False), (64, 2048, 8192, False),
        (17, 128256, 4096, False), (64, 128256, 4096, False),
    ],
)  # fmt: skip
def test_described_products_use_the_copy_engine(
    rows: int, outputs: int, depth: int, gated: bool, dtype: torch.dtype
) -> None:
    """The tiles that the products of a large model get: fetched without an address, multiplied by whole warp groups."""
    ptx, shared = compiled_product(rows, outputs, depth, gated, dtype, x_described=True)
    assert "cp.async.bulk.tensor" in ptx
    assert "cp.async.cg" not in ptx
    assert "wgmma" in ptx
    assert shared <= SHARED_MEMORY


@pytest.mark.parametrize(("rows", "outputs", "depth", "gated"), [(40, 4096, 14336, False), (72, 14336, 4096, True)])
def test_rows_of_a_partial_tile_are_copied_by_address(rows: int, outputs: int, depth: int, gated: bool) -> None:
    """Weights by TMA and rows of x by address, both in flight while others are multiplied; both are waited for."""
    ptx, shared = compiled_product(rows, outputs, depth, gated, torch.bfloat16, x_described=False)
    for instruction in ("cp.async.bulk.tensor", "cp.async.cg", "cp.async.wait_group", "mbarrier.try_wait", "wgmma"):
        assert instruction in ptx
    assert shared <= SHARED_MEMORY


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize(
    ("rows", "outputs", "depth", "gated"), [(64, 14336, 4096, True), (128, 14336, 4096, True), (64, 4096, 14336, False)]
)
def test_changes_of_adapters_are_fetched_while_others_are_added(
    rows: int, outputs: int, depth: int, gated: bool, width: int
) -> None:
    """In the tiles of a large model: no TMA fetches them, and their room in shared memory is that of the weights."""
    ptx, shared = compiled_product(rows, outputs, depth, gated, torch.bfloat16, x_described=True, width=width)
    assert "cp.async.cg" in ptx
    assert "ld.global.v4" in ptx  # the first ones, before the sums
    assert shared <= SHARED_MEMORY


def test_which_products_are_described() -> None:
    """As timed: enough outputs for tiles of 64, 17 to 64 rows of 16 bits, and never where it is impossible."""

    def is_described(rows: int, outputs: int, *, gated: bool = False, described: bool = True) -> bool:
        tile = gemm_tuning.few_rows_tile(rows, outputs, 1024, torch.bfloat16, gated=gated, described=described)
        return tile.described

    assert [is_described(rows, 4096) for rows in (2, 16, 17, 33, 64, 65)] == [False, False, True, True, True, False]
    assert [is_described(64, outputs) for outputs in (1024, 2048, 128256)] == [False, True, True]
    assert [is_described(64, outputs, gated=True) for outputs in (2048, 3072, 8192)] == [False, True, True]
    assert [is_described(32, outputs, gated=True) for outputs in (3072, 8192)] == [False, True]
    assert not is_described(64, 4096, described=False)
    assert not gemm_tuning.few_rows_tile(64, 4096, 4096, torch.float32, described=True).described
    assert [is_described(rows, 8192, gated=True) for rows in (64, 65, 128, 129)] == [True, True, True, False]
    for count, gated in ((65, True), (128, True), (129, True), (128, False)):
        ours = gated and count <= 128
        assert gemm_tuning.library_is_faster(count, 8192, 2048, gated=gated, described=True) is not ours
        assert gemm_tuning.library_is_faster(count, 8192, 2048, gated=gated, described=False)
    for described in (False, True):
        assert gemm_tuning.library_is_faster(64, 6144, 4096, gated=False, described=described) is not described
        assert gemm_tuning.library_is_faster(65, 6144, 4096, gated=False, described=described)
