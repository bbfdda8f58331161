"""What the tests of the native kernels share: instruction sets, threads, batches, and the defined arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from bifolio.cache.storage import KVStorage
from bifolio.errors import MissingDependencyError
from bifolio.kernels import native
from bifolio.kernels.interface import AttentionPhase, AttentionSegment, Linear
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from helpers import kv_storage


def isas() -> list[str]:
    """The instruction sets to test; a module that asks is skipped where the library is not built."""
    try:
        return native.available_isas()
    except MissingDependencyError as error:
        pytest.skip(str(error), allow_module_level=True)


@contextmanager
def settings(isa: str = "", threads: int = 0) -> Iterator[None]:
    """Run a block on one instruction set and a number of threads."""
    native.set_isa(isa)
    native.set_num_threads(threads)
    try:
        yield
    finally:
        native.set_isa("")
        native.set_num_threads(0)


def random_linear(
    rng: np.random.Generator, sizes: Sequence[int], k: int, format: QuantFormat, bias: bool = False
) -> Linear:
    parts = tuple(QuantizedTensor.quantize(rng.standard_normal((n, k)), format) for n in sizes)
    biases = tuple(rng.standard_normal(n).astype(np.float32) if bias else None for n in sizes)
    return Linear(parts, biases)


def fused_multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """fma in float32: the exact product plus c, rounded once. Long doubles hold the sum of both without loss."""
    wide = np.longdouble
    return (a.astype(wide) * b.astype(wide) + c.astype(wide)).astype(np.float32)


def quantize_blocks(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows as blocks of 32: (q i32[rows, blocks, 32], d f32[rows, blocks])."""
    blocks = x.reshape(x.shape[0], -1, 32)
    largest = np.abs(blocks).max(axis=2)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0)).astype(np.float32)
    wide = blocks.astype(np.longdouble) * inverse[:, :, None].astype(np.longdouble)
    q = np.rint(wide).astype(np.int32)
    return q, (largest * np.float32(1 / np.float32(127))).astype(np.float32)


def weight_blocks(tensor: QuantizedTensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A quantised matrix as (q i32[n, blocks, 32], d f32[n, blocks], m f32[n, blocks])."""
    raw = tensor.data.reshape(tensor.shape[0], -1, tensor.format.block_bytes)
    d = raw[:, :, :2].copy().view(np.float16)[:, :, 0].astype(np.float32)
    m = np.zeros_like(d)
    if tensor.format is QuantFormat.Q8_0:
        return raw[:, :, 2:].view(np.int8).astype(np.int32), d, m
    header = 4 if tensor.format is QuantFormat.Q4_1 else 2
    packed = raw[:, :, header:].astype(np.int32)
    q = np.concatenate([packed & 15, packed >> 4], axis=2)
    if tensor.format is QuantFormat.Q4_1:
        return q, d, raw[:, :, 2:4].copy().view(np.float16)[:, :, 0].astype(np.float32)
    return q - 8, d, m


def block_product(x: np.ndarray, tensor: QuantizedTensor) -> np.ndarray:
    """x W^T by the defined arithmetic of block formats: f32[rows, n]."""
    xq, xd = quantize_blocks(x)
    wq, wd, wm = weight_blocks(tensor)
    y = np.zeros((x.shape[0], tensor.shape[0]), np.float32)
    for first in range(0, xq.shape[1], 32):
        blocks = range(first, min(first + 32, xq.shape[1]))
        for b in blocks:
            dots = (xq[:, b] @ wq[:, b].T).astype(np.float32)
            y = fused_multiply_add(dots, xd[:, b, None] * wd[None, :, b], y)
        for b in blocks if tensor.format is QuantFormat.Q4_1 else ():
            sums = xd[:, b] * xq[:, b].sum(axis=1).astype(np.float32)
            y = fused_multiply_add(wm[None, :, b], sums[:, None], y)
    return y


def tile_product(x: np.ndarray, tensor: QuantizedTensor) -> np.ndarray:
    """x W^T by the defined arithmetic of block formats on tiles of bfloat16: f32[rows, n]."""
    bits = x.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)).view(
        np.float32
    )
    widening = np.float32(1.0028177)
    q, d, m = weight_blocks(tensor)
    scale, minimum = (d * widening)[:, :, None], (m * widening)[:, :, None]
    wide = q.astype(np.float32)
    weights = fused_multiply_add(wide, scale, minimum) if tensor.format is QuantFormat.Q4_1 else wide * scale
    weights = (weights.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    y = np.zeros((x.shape[0], tensor.shape[0]), np.float32)
    for b in range(q.shape[1]):
        halves = [np.zeros_like(y), np.zeros_like(y)]
        for e in range(32):
            halves[e % 2] = fused_multiply_add(rounded[:, b * 32 + e, None], weights[None, :, b, e], halves[e % 2])
        y = y + (halves[0] + halves[1])
    return y


def float_product(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """x W^T as chains of fma: f32[rows, n]."""
    y = np.zeros((x.shape[0], weights.shape[0]), np.float32)
    for k in range(x.shape[1]):
        y = fused_multiply_add(x[:, k, None], weights[None, :, k], y)
    return y


def filled_storage(
    rng: np.random.Generator, contexts: Sequence[int], kv_heads: int, dim: int, dtype: str, block_size: int
) -> tuple[KVStorage, np.ndarray]:
    """A cache of one layer that holds random keys and values for each sequence; all other slots are NaN."""
    blocks = [-(-length // block_size) for length in contexts]
    storage = kv_storage(1, 1 + sum(blocks), block_size, kv_heads, dim, dtype, poison=True)  # type: ignore[arg-type]
    order = rng.permutation(np.arange(1, 1 + sum(blocks), dtype=np.int32))
    tables = np.zeros((len(contexts), max(blocks)), np.int32)
    for i, length in enumerate(contexts):
        start = sum(blocks[:i])
        tables[i, : blocks[i]] = order[start : start + blocks[i]]
        positions = np.arange(length)
        slots = tables[i, positions // block_size].astype(np.int64) * block_size + positions % block_size
        shape = (length, kv_heads, dim)
        storage.write(0, slots, rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32))
    return storage, tables


def segment(
    queries: Sequence[int],
    contexts: Sequence[int],
    tables: np.ndarray | None,
    start: int = 0,
    phase: AttentionPhase | None = None,
) -> AttentionSegment:
    """Sequences of one segment; without a phase, those of one query each are decodes."""
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    phase = phase or (AttentionPhase.PREFILL if max(queries) > 1 else AttentionPhase.DECODE)
    return AttentionSegment(
        phase=phase,
        token_start=start,
        token_end=start + int(starts[-1]),
        query_starts=starts,
        context_lens=np.asarray(contexts, np.int32),
        block_tables=tables,
        fresh=False,
        max_query_len=max(queries),
        max_context_len=max(contexts),
    )
