"""Weights in Q8_0, Q4_0, Q4_1 and MXFP4, used without conversion: a GPU reads a half or a quarter of the bytes.

A block holds 32 values of a row. On the device values, scales and minima are separate arrays, for contiguous reads:

    values   Q8_0: i8[outputs, depth]    others: u8[outputs, depth / 2], element j of a block beside element j + 16
    scales   f16[outputs, depth / 32]    MXFP4: u8, exponents of 2 plus 127
    minima   f16[outputs, depth / 32]    Q4_1 alone

    out = act(norm(x) @ dequantised.T + bias) + residual          (each part optional)

One row: plain multiply-adds on the blocks as they are read. Few rows: a tile of the weight is dequantised in registers
and multiplied by tensor cores. Many rows: the whole weight is dequantised once, and cuBLAS multiplies.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton

from bifolio.kernels.interface import Array, Linear, Norm
from bifolio.kernels.native.encode import quickly_converted
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import fp8, fp8_rows
from bifolio.kernels.triton.epilogue import fused
from bifolio.kernels.triton.fp8 import Fp8Weight
from bifolio.kernels.triton.gemm_small_m import shared_tiles
from bifolio.kernels.triton.gemm_tuning import INTERPRETED, RowTile
from bifolio.kernels.triton.pdl import OVERLAPPED
from bifolio.kernels.triton.quantised_kernels import dequantise_kernel, one_row_kernel
from bifolio.kernels.triton.quantised_rows import few_rows_kernel
from bifolio.quant.convert import DENSE_FORMATS, convert
from bifolio.quant.formats import QuantFormat
from bifolio.quant.mapped import release_pages
from bifolio.quant.tensor import QuantizedTensor

KINDS = {QuantFormat.Q8_0: 0, QuantFormat.Q4_0: 1, QuantFormat.Q4_1: 2, QuantFormat.MXFP4: 3}  # KIND of the kernels
FORMATS = DENSE_FORMATS | frozenset(KINDS)  # used without conversion
HEADER_BYTES = {QuantFormat.Q8_0: 2, QuantFormat.Q4_0: 2, QuantFormat.Q4_1: 4, QuantFormat.MXFP4: 1}  # before values
FEW_ROWS = 64  # products with at most this many rows dequantise tile by tile
FIXED_ROWS = 64  # rows of a tile in deterministic mode, for any batch size


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A matrix [outputs, depth] on the device, in blocks."""

    format: QuantFormat
    values: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    shape: tuple[int, int]

    @property
    def kind(self) -> int:
        return KINDS[self.format]

    @property
    def nbytes(self) -> int:
        parts = (self.values, self.scales, self.minima)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows of a matrix as the file holds them, on the device."""

    format: QuantFormat
    data: torch.Tensor  # u8[rows, row_bytes]
    shape: tuple[int, int]


def pack(parts: tuple[QuantizedTensor | CopiedRows, ...], device: str) -> QuantisedWeight:
    """Concatenate matrices of one format and width; values and scales are separated on the device."""
    format, (_, depth) = parts[0].format, parts[0].shape
    raw = torch.cat([on_device(part.data, device) for part in parts])
    blocks = raw.view(raw.shape[0], depth // 32, format.block_bytes)
    header = HEADER_BYTES[format]
    values = blocks[:, :, header:].contiguous().view(raw.shape[0], -1)
    factors = blocks[:, :, :header].contiguous()
    if format is not QuantFormat.MXFP4:
        factors = factors.view(torch.float16)
    return QuantisedWeight(
        format,
        values.view(torch.int8) if format is QuantFormat.Q8_0 else values,
        factors[:, :, 0].contiguous(),
        factors[:, :, 1].contiguous() if format is QuantFormat.Q4_1 else None,
        (raw.shape[0], depth),
    )


def on_device(data: np.ndarray | torch.Tensor, device: str) -> torch.Tensor:
    """Rows of a file; those of experts that a stream copied are there already."""
    return data if isinstance(data, torch.Tensor) else torch.from_numpy(np.array(data)).to(device)


# -- launching ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class QuantisedTile:
    """Tile sizes of one product shape."""

    outputs: int  # rows of the weight per program
    blocks: int  # of 32 columns each, per tile
    warps: int
    stages: int = 1


def one_row(
    x: torch.Tensor,  # [1, depth]
    weight: QuantisedWeight,
    *,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    tile: QuantisedTile | None = None,
) -> torch.Tensor:
    """[1, outputs]"""
    outputs, depth = weight.shape
    outputs = outputs if activation is None else outputs // 2
    tile = tile or one_row_tile(weight.format, outputs)
    out = torch.empty((1, outputs), dtype=out_dtype or x.dtype, device=x.device)
    one_row_kernel[(triton.cdiv(outputs, tile.outputs),)](
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        x if norm is None else norm.weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        outputs,
        0.0 if norm is None else norm.eps,
        DEPTH=depth,
        KIND=weight.kind,
        OUTPUTS=tile.outputs,
        BLOCKS=min(tile.blocks, triton.next_power_of_2(depth // 32)),
        STAGES=tile.stages,
        HAS_NORM=norm is not None,
        **fused(bias, residual, activation),
        num_warps=tile.warps,
        **OVERLAPPED,
    )
    return out


def few_rows(
    x: torch.Tensor,  # [rows, depth]
    weight: QuantisedWeight,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    tile: RowTile | None = None,
    fixed: bool = False,  # same tiles for any number of rows: results do not depend on the batch
) -> torch.Tensor:
    """[rows, outputs]; correct for any number of rows, fast for few."""
    num_rows, depth = x.shape
    outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
    if tile is None:
        tile = few_rows_tile(num_rows, outputs, depth, x.dtype, weight.kind, gated=activation is not None, fixed=fixed)
    rows = tile.rows if fixed else min(max(16, triton.next_power_of_2(num_rows)), tile.rows)
    out = torch.empty((num_rows, outputs), dtype=out_dtype or x.dtype, device=x.device)
    grid = triton.cdiv(outputs, tile.outputs), triton.cdiv(num_rows, rows), tile.splits
    few_rows_kernel[grid](
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.minima is None else weight.minima,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        *shared_tiles(grid, rows * tile.outputs * (1 if activation is None else 2), out),
        num_rows,
        outputs,
        x.stride(0),
        DEPTH=depth,
        KIND=weight.kind,
        SPLITS=tile.splits,
        ROWS=rows,
        OUTPUTS=tile.outputs,
        BLOCK=tile.depth,
        STAGES=tile.stages,
        SWAPPED=tile.swapped,
        **fused(bias, residual, activation),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OVERLAPPED,
    )
    return out


def dequantise(
    weight: QuantisedWeight, dtype: torch.dtype, *, rows: torch.Tensor | None = None, factor: float = 1.0
) -> torch.Tensor:
    """[n, depth]: the dequantised matrix, or the given rows of it, times `factor`."""
    depth = weight.shape[1]
    count = weight.shape[0] if rows is None else int(rows.shape[0])
    out = torch.empty((count, depth), dtype=dtype, device=weight.values.device)
    blocks = min(triton.next_power_of_2(depth // 32), 64)
    if count:
        dequantise_kernel[(count, triton.cdiv(depth // 32, blocks))](
            weight.values,
            weight.scales,
            weight.scales if weight.minima is None else weight.minima,
            weight.scales if rows is None else rows,
            out,
            factor,
            DEPTH=depth,
            KIND=weight.kind,
            BLOCKS=blocks,
            LOOKS_UP=rows is not None,
            num_warps=4,
            **OVERLAPPED,
        )
    return out


def one_row_tile(format: QuantFormat, outputs: int) -> QuantisedTile:
    """Tiles of 4 to 16 kB and several programs per multiprocessor."""
    if INTERPRETED:
        return QuantisedTile(64, 2, 4)
    blocks = 64 if format is QuantFormat.Q8_0 else 128
    return QuantisedTile(4 if outputs >= 2048 else 2, blocks, 4)


def few_rows_tile(
    rows: int, outputs: int, depth: int, dtype: torch.dtype, kind: int, *, gated: bool, fixed: bool
) -> RowTile:
    """As measured on an H200 with the products of the 8B shape, at 16 and 64 rows."""
    if INTERPRETED:
        return RowTile(64, 64, 4, rows=FIXED_ROWS)
    if dtype == torch.float32:
        return RowTile(32, 32, 4, 2, rows=FIXED_ROWS)
    if fixed:
        return RowTile(64, 128, 4, 4, swapped=True, rows=FIXED_ROWS)
    if rows <= 16 and gated and kind != 0:
        return RowTile(64, 128, 4, 3, splits=_splits(triton.cdiv(outputs, 64), depth, 2), rows=FIXED_ROWS)
    if rows <= 16:
        return RowTile(32, 256, 4, 3, splits=_splits(triton.cdiv(outputs, 32), depth, 2), rows=FIXED_ROWS)
    if gated and kind == 0:
        return RowTile(64, 128, 4, 3, swapped=True, rows=FIXED_ROWS)
    splits = 1 if gated else _splits(triton.cdiv(outputs, 128), depth, 4)
    return RowTile(128, 128, 8, 3, swapped=True, splits=splits, rows=FIXED_ROWS)


def _splits(tiles: int, depth: int, wanted: int) -> int:
    """Programs that share the depth of a tile: `wanted`, or more of few tiles; each has 256 columns or more."""
    return max(min(max(wanted, 128 // tiles), 8, depth // 256), 1)


# -- the kernel set's part ---------------------------------------------------------------------------------------------
class PackedWeights:
    """Prepares weights: quantised ones stay in their blocks, all others become dense tensors (`TorchKernels`).

    `Linear.prepared` is (weight, bias or None).
    """

    def __init__(self, torch_kernels: TorchKernels) -> None:
        self._torch = torch_kernels
        self._tables: deque[tuple[Any, Any]] = deque(maxlen=2)  # original and prepared tables: tokens, then positions

    def prepare_linear(self, linear: Linear) -> Linear:
        weight = next((prepared for table, prepared in reversed(self._tables) if _is_tied(linear, table)), None)
        if weight is None and fp8.can_store(linear.parts):
            weight = fp8.store(linear.parts, self._torch.device)
            release(linear.parts)
        if weight is None:
            parts = tuple(convert(part, FORMATS, quickly_converted) for part in linear.parts)
            if not usable(parts):
                prepared = self._torch.prepare_linear(replace(linear, parts=parts))
                release(linear.parts)
                return prepared
            weight = pack(parts, self._torch.device)
            release(linear.parts)
        bias = self._bias(linear)
        return Linear((weight,), (bias,), (weight, bias), linear.shards)

    def prepare_embedding(self, table: QuantizedTensor | Array) -> Any:
        part = convert(table, FORMATS, quickly_converted)
        prepared = pack((part,), self._torch.device) if usable((part,)) else self._torch.prepare_embedding(part)
        release((table,))
        self._tables.append((table, prepared))
        return prepared

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        """Multiply many rows by cuBLAS, after dequantising a quantised weight."""
        weight = None if linear.prepared is None else linear.prepared[0]
        if isinstance(weight, Fp8Weight):
            return fp8_rows.many_rows(x, weight, linear.prepared[1])
        if not isinstance(weight, QuantisedWeight):
            result: torch.Tensor = self._torch.linear(x, linear)
            return result
        bias = linear.prepared[1]
        if x.shape[0] <= FEW_ROWS:
            return few_rows(x, weight, bias=bias)
        return torch.nn.functional.linear(x, dequantise(weight, x.dtype), bias)

    def _bias(self, linear: Linear) -> torch.Tensor | None:
        """One bias for all parts; zeros where a part has none."""
        if all(bias is None for bias in linear.biases):
            return None
        torch_kernels = self._torch
        each = [
            torch.zeros(part.shape[0], dtype=torch_kernels.dtype, device=torch_kernels.device)
            if bias is None
            else torch_kernels.tensor(bias)
            for part, bias in zip(linear.parts, linear.biases, strict=True)
        ]
        return torch.cat(each)


def release(parts: tuple[Any, ...]) -> None:
    """Drop the pages of the file that hold these matrices: the device has a copy."""
    for part in parts:
        if isinstance(part, QuantizedTensor):
            release_pages(part.stored)


def usable(parts: tuple[Any, ...]) -> bool:
    """Whether these matrices, which share their input, can stay quantised: one format, for which there are kernels."""
    formats = {part.format if isinstance(part, QuantizedTensor) else None for part in parts}
    return len(formats) == 1 and formats.pop() in KINDS


def _is_tied(linear: Linear, table: Any) -> bool:
    """Whether the head is the embedding table: one copy in memory is used for both."""
    return len(linear.parts) == 1 and linear.parts[0] is table
