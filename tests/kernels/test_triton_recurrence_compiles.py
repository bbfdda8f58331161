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
from test_triton_compiles import HOPPER, SHARED_MEMORY
from triton.compiler import ASTSource

from bifolio.kernels.triton import chunked_scan, device_state, keyed_chunks, recurrence, rwkv, rwkv_chunks, selective

pytestmark = pytest.mark.full
POINTERS = {
    "x": "*bf16", "windows": "*fp32", "old": "*fp32", "weight": "*fp32", "bias": "*fp32", "mixed": "*fp32",
    "matrices": "*fp32", "gates": "*bf16", "states": "*fp32", "decay": "*fp32", "skip": "*fp32", "y": "*fp32",
    "out": "*fp32", "factors": "*fp32", "sums": "*fp32", "rates": "*fp32", "weights": "*fp32", "solutions": "*fp32",
    "query_scale": "fp32", "eps": "fp32", "least": "fp32", "most": "fp32", "rate_scale": "fp32",
    "bound": "fp32",
    "slowest": "fp32", "least_length": "fp32",
    **dict.fromkeys(("sequences", "starts", "reads", "writes", "rows", "slot_reads", "slot_writes"), "*i32"),
    **dict.fromkeys(("ends", "lengths", "first_chunks", "last_chunks", "num_sequences"), "*i32"),
}  # fmt: skip
CONVOLVE = {
    "WIDTH": 4, "GATED": False, "PLAIN": False, "UNIT": True, "HAS_BIAS": False, "HAS_STATES": True,
    "IS_DECODE": False, "TOKENS": 8, "BLOCK": 128,
}  # fmt: skip
HEADS = {"DELTA": True, "TILED": False, "HAS_SKIP": False, "HAS_STATES": True, "KEYS": 128}
SCAN = {
    **HEADS, "KEYED": False, "BOUNDED": False, "STEPS": True, "IS_DECODE": False, "ONE_TOKEN": False, "COUNTED": False,
    "VALUES": 16, "STAGES": 3,
}  # fmt: skip
PREPARE = {"DELTA": True, "STEPS": True, "TILED": False, "KEYS": 128, "CHUNK": 64, "BLOCK": 16, "PRECISION": "tf32"}
CHUNKS = {**HEADS, "COUNTED": True, "VALUES": 32, "CHUNK": 64, "STAGES": 2, "PRECISION": "tf32"}
KEYED_DECAYS = {"BOUNDED": False, "KEYS": 128, "CHUNK": 64}
KEYED_CHUNKS = {"KEYS": 128, "CHUNK": 64, "BLOCK": 16, "PRECISION": "tf32"}
KEYED_SCAN = {"HAS_STATES": True, "COUNTED": True, "KEYS": 128, "VALUES": 32, "CHUNK": 64, "PRECISION": "tf32"}
RWKV_CHUNKS = {"KEYS": 64, "CHUNK": 64, "BLOCK": 16, "PRECISION": "tf32"}
RWKV_SCAN = {
    "MIXES_VALUES": True, "HAS_STATES": True, "COUNTED": True, "KEYS": 64, "VALUES": 32, "CHUNK": 64,
    "PRECISION": "tf32",
}  # fmt: skip
FINISH = {"HAS_NORM": True, "NORM_FIRST": True, "SIGMOID": False, "SHARED": True, "ROWS": 16, "BLOCK": 128}
CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "convolution of qwen3_next": (recurrence._convolve_kernel, CONVOLVE, 4),
    "convolution of lfm2": (
        recurrence._convolve_kernel,
        {**CONVOLVE, "WIDTH": 3, "GATED": True, "UNIT": False, "TOKENS": 4, "BLOCK": 256},
        4,
    ),
    "convolution of lfm3": (
        recurrence._convolve_kernel,
        {**CONVOLVE, "WIDTH": 7, "GATED": True, "UNIT": False, "TOKENS": 4, "BLOCK": 256},
        4,
    ),
    "scan of qwen3_next": (recurrence._scan_kernel, SCAN, 1),
    "scan of kimi_linear": (recurrence._scan_kernel, {**SCAN, "KEYED": True}, 1),
    "scan of bailing_hybrid": (recurrence._scan_kernel, {**SCAN, "KEYED": True, "BOUNDED": True}, 1),
    "scan of granite": (recurrence._scan_kernel, {**SCAN, "DELTA": False, "HAS_SKIP": True}, 1),
    "scan of jamba": (
        selective._selective_kernel,
        {"HAS_STATES": True, "IS_DECODE": False, "KEYS": 16, "BLOCK": selective.CHANNELS, "STAGES": 3},
        1,
    ),
    "convolution of recurrent_gemma": (
        recurrence._convolve_kernel,
        {**CONVOLVE, "PLAIN": True, "UNIT": False, "HAS_BIAS": True, "TOKENS": 4, "BLOCK": 256},
        4,
    ),
    "scan of recurrent_gemma": (
        selective._unit_kernel, {"HAS_STATES": True, "IS_DECODE": False, "BLOCK": selective.CHANNELS, "STAGES": 3}, 1,
    ),
    "scan of minimax": (recurrence._scan_kernel, {**SCAN, "DELTA": False, "STEPS": False}, 1),
    "chunks of minimax": (chunked_scan._prepare_kernel, {**PREPARE, "DELTA": False, "STEPS": False}, 4),
    "norm of minimax": (
        recurrence._finish_kernel, {**FINISH, "SIGMOID": True, "SHARED": False, "ROWS": 1, "BLOCK": 8192}, 8,
    ),
    "chunks of qwen3_next": (chunked_scan._prepare_kernel, PREPARE, 4),
    "chunks of qwen3_next in f32": (chunked_scan._prepare_kernel, {**PREPARE, "PRECISION": "tf32x3"}, 4),
    "chunks of falcon_h1": (chunked_scan._prepare_kernel, {**PREPARE, "DELTA": False, "KEYS": 256}, 4),
    "scan of chunks of qwen3_next": (chunked_scan._scan_chunks_kernel, CHUNKS, 4),
    "scan of chunks of qwen3_next in f32": (chunked_scan._scan_chunks_kernel, {**CHUNKS, "PRECISION": "tf32x3"}, 4),
    "scan of chunks of granite": (chunked_scan._scan_chunks_kernel, {**CHUNKS, "DELTA": False, "HAS_SKIP": True}, 4),
    "scan of chunks of falcon_h1": (
        chunked_scan._scan_chunks_kernel,
        {**CHUNKS, "DELTA": False, "HAS_SKIP": True, "KEYS": 256, "STAGES": chunked_scan.stages(256, 32)},
        4,
    ),
    "decays of chunks of kimi_linear": (keyed_chunks._decay_kernel, KEYED_DECAYS, 4),
    "decays of chunks of bailing_hybrid": (keyed_chunks._decay_kernel, {**KEYED_DECAYS, "BOUNDED": True}, 4),
    "chunks of kimi_linear": (keyed_chunks._weigh_kernel, KEYED_CHUNKS, 8),
    "chunks of kimi_linear in f32": (keyed_chunks._weigh_kernel, {**KEYED_CHUNKS, "PRECISION": "tf32x3"}, 8),
    "scan of chunks of kimi_linear": (keyed_chunks._scan_kernel, KEYED_SCAN, 4),
    "scan of chunks of kimi_linear in f32": (keyed_chunks._scan_kernel, {**KEYED_SCAN, "PRECISION": "tf32x3"}, 4),
    "norm of qwen3_next": (recurrence._finish_kernel, FINISH, 4),
    "norm of kimi_linear": (recurrence._finish_kernel, {**FINISH, "SIGMOID": True}, 4),
    "norm of granite": (
        recurrence._finish_kernel, {**FINISH, "NORM_FIRST": False, "SHARED": False, "ROWS": 1, "BLOCK": 8192}, 8,
    ),
    "shift of rwkv7": (
        rwkv._shift_kernel, {"MIXES": 6, "HAS_STATES": True, "IS_DECODE": False, "BLOCK": 256}, 1,
    ),
    "scan of rwkv7": (
        rwkv._rwkv_kernel,
        {"MIXES_VALUES": True, "HAS_NORM": True, "HAS_BIAS": True, "HAS_STATES": True, "IS_DECODE": False, "KEYS": 64,
         "VALUES": 64},
        4,
    ),
    "chunks of rwkv7": (rwkv_chunks._prepare_kernel, RWKV_CHUNKS, 8),
    "chunks of rwkv7 in f32": (rwkv_chunks._prepare_kernel, {**RWKV_CHUNKS, "PRECISION": "tf32x3"}, 8),
    "scan of chunks of rwkv7": (rwkv_chunks._scan_kernel, RWKV_SCAN, 4),
    "scan of chunks of rwkv7 in f32": (rwkv_chunks._scan_kernel, {**RWKV_SCAN, "PRECISION": "tf32x3"}, 4),
    "norm of chunks of rwkv7": (
        rwkv_chunks._finish_kernel,
        {"MIXES_VALUES": True, "HAS_NORM": True, "HAS_BIAS": True, "VALUES": 64, "CHUNK": 64},
        4,
    ),
    "states of a step": (device_state._begin_states_kernel, {"BLOCK": 64}, 1),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_kernel_compiles_for_a_gpu(name: str) -> None:
    kernel, constants, warps = CASES[name]
    signature = {a: "constexpr" if a in constants else POINTERS.get(a, "i32") for a in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": 3})
    assert "ptx" in compiled.asm
    assert compiled.metadata.shared <= SHARED_MEMORY
    if kernel in (chunked_scan._prepare_kernel, chunked_scan._scan_chunks_kernel):
        assert "wgmma" in compiled.asm["ptx"]  # products on tensor cores
    if kernel in (recurrence._scan_kernel, selective._selective_kernel, selective._unit_kernel):
        assert "ld.local" not in compiled.asm["ptx"]  # the state stays in registers
        assert "cp.async" in compiled.asm["ptx"]  # the next tokens are read ahead
