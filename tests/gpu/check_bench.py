"""Shared by the checks of GPU kernels: random inputs, sequences in a cache, the attention they should get."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch

from bifolio.cache.storage import CacheLayout, KVStorage
from bifolio.config import KVDtype
from bifolio.kernels.interface import AttentionPhase, AttentionSegment, AttentionShape
from bifolio.kernels.reference_attention import causal_attention
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Bench:
    """A Triton kernel set, torch's in f32 as its reference, and a source of random inputs."""

    def __init__(self, kernels: Any, seed: int = 0) -> None:
        self.kernels = kernels
        self.reference = TorchKernels(kernels.device, "f32")
        self.dtype, self.device = kernels.dtype, kernels.device
        self.generator = torch.Generator(device=kernels.device).manual_seed(seed)

    def normal(self, *size: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(size, generator=self.generator, device=self.device) * scale
        return values.to(dtype or self.dtype)

    def integers(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=torch.int32, device=self.device)


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison."""

    name: str
    error: Callable[[Bench], float]  # |out - reference| / |reference|
    large: bool = False  # only a GPU gets through it in time
    narrow: bool = False  # for dtypes of 16 bits alone

    def run(self, kernels: Any) -> None:
        error, tolerance = self.error(Bench(kernels, crc32(self.name.encode()))), TOLERANCE[kernels.dtype]
        assert error < tolerance, f"{self.name}: relative error {error:.2e}, {tolerance} is allowed"


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """NaN and infinities count as infinite error."""
    ours, theirs = ours.double(), theirs.double()
    if not bool(torch.isfinite(ours).all()):
        return math.inf
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))


@dataclass(frozen=True, slots=True)
class Context:
    """Sequences in a cache, and where to find them."""

    storage: KVStorage
    tables: torch.Tensor  # i32[s, blocks]
    index: list[torch.Tensor]  # i64[n]  entries of each sequence's tokens


def new_context(
    bench: Bench, shape: AttentionShape, lengths: list[int], block_size: int, dtype: KVDtype | None = None
) -> Context:
    """A cache in which these sequences lie in blocks of random order; everything else in it is NaN."""
    names: dict[torch.dtype, KVDtype] = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
    counts = [-(-length // block_size) for length in lengths]
    dtype = dtype or names[bench.dtype]
    layout = CacheLayout(shape.layer + 1, sum(counts) + 3, block_size, shape.num_kv_heads, shape.head_dim, dtype, True)
    storage = KVStorage(layout, device=bench.device, backend="torch")
    order = 1 + np.random.default_rng(sum(lengths)).permutation(sum(counts) + 2)
    tables = np.zeros((len(lengths), max(counts) + 2), dtype=np.int32)
    index, used = [], 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = order[used : used + count]
        used += count
        positions = np.arange(length)
        places = tables[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
        index.append(torch.from_numpy(places).to(bench.device))
    return Context(storage, bench.integers(tables), index)


def fill(bench: Bench, context: Context, shape: AttentionShape) -> None:
    """Random keys and values for every token of every sequence."""
    for index in context.index:
        size = (len(index), shape.num_kv_heads, shape.head_dim)
        context.storage.write(shape.layer, index, bench.normal(*size), bench.normal(*size))


def rows_of(array: torch.Tensor, index: torch.Tensor, block_size: int) -> torch.Tensor:
    """[tokens, kv_heads, dim] of a cache; torch indexes the bytes of FP8."""
    cells = array.view(torch.uint8) if array.dtype == torch.float8_e4m3fn else array
    return cells[index // block_size, :, index % block_size].view(array.dtype)


def expected_attention(
    bench: Bench, query: torch.Tensor, shape: AttentionShape, context: Context, query_lens: list[int]
) -> torch.Tensor:
    """[t, heads * dim] in float32, sequence by sequence."""
    outputs, start = [], 0
    for index, count in zip(context.index, query_lens, strict=True):
        size = context.storage.block_size
        keys, values = (
            rows_of(array, index, size).float()
            for array in (context.storage.keys[shape.layer], context.storage.values[shape.layer])
        )
        part = query[start : start + count].float()
        outputs.append(causal_attention(part, keys, values, shape.scale, shape.window))
        start += count
    return torch.cat(outputs)


def segment_of(phase: AttentionPhase, query_lens: list[int], lengths: list[int], tables: Any) -> AttentionSegment:
    counts = np.array(query_lens, dtype=np.int32)
    orchestrator = PrefillOrchestrator if phase is AttentionPhase.PREFILL else DecodeOrchestrator
    return orchestrator.lay_out(np.array(lengths, dtype=np.int32) - counts, counts, tables)


def describe(shape: AttentionShape) -> str:
    window = "" if shape.window is None else f" window {shape.window}"
    return f"{shape.num_heads}/{shape.num_kv_heads}x{shape.head_dim}{window}"


def brief(lengths: list[int]) -> str:
    return str(lengths) if len(lengths) < 6 else f"[{lengths[0]}..{lengths[-1]}]*{len(lengths)}"
