"""Quantised weights, used without conversion: a GPU reads the bytes of the file (`row_layouts`).

    out = act(norm(x) @ dequantised.T + bias) + residual          (each part optional)

One row: `row_codes.cu` where CUDA kernels can be compiled, else multiply-adds on dequantised tiles. Few rows:
`code_product.cu` there, else a kernel in Triton; both dequantise tiles of the weight in registers and multiply them
by tensor cores. Many rows: the whole weight is dequantised once, and cuBLAS multiplies. Matrices that share their
input but not their format are multiplied one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import triton

from bifolio.kernels.cuda import code_product
from bifolio.kernels.cuda.row_product import can_multiply, row_product
from bifolio.kernels.interface import Array, Linear, Norm
from bifolio.kernels.native.encode import quickly_converted
from bifolio.kernels.torch_reference import TorchKernels
from bifolio.kernels.triton import fp8, fp8_rows
from bifolio.kernels.triton.epilogue import NO_ACTIVATION, fused
from bifolio.kernels.triton.fp8 import Fp8Weight
from bifolio.kernels.triton.gemm_small_m import shared_tiles
from bifolio.kernels.triton.gemm_tuning import INTERPRETED, RowTile
from bifolio.kernels.triton.norm import ACTIVATIONS, act_mul
from bifolio.kernels.triton.pdl import OVERLAPPED
from bifolio.kernels.triton.quantised_kernels import dequantise_kernel, one_row_kernel
from bifolio.kernels.triton.quantised_rows import few_rows_kernel
from bifolio.kernels.triton.row_layouts import LAYOUTS, QuantisedWeight, held_bits, pack
from bifolio.quant.convert import DENSE_FORMATS, HeldFormats, convert
from bifolio.quant.mapped import release_pages
from bifolio.quant.tensor import QuantizedTensor

FORMATS = HeldFormats({format: held_bits(format) for format in DENSE_FORMATS | frozenset(LAYOUTS)})  # not converted
FEW_ROWS = 64  # products with at most this many rows dequantise tile by tile
FIXED_ROWS = 64  # rows of a tile in deterministic mode, for any batch size


@dataclass(frozen=True, slots=True)
class MixedWeight:
    """Matrices in several formats, one below the other."""

    parts: tuple[QuantisedWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


def store(parts: tuple[QuantizedTensor, ...], device: str) -> QuantisedWeight | MixedWeight:
    """The matrices, one below the other, on the device."""
    each = tuple(pack(tuple(run), device) for _, run in groupby(parts, key=lambda part: part.format))
    return each[0] if len(each) == 1 else MixedWeight(each)


# -- launching ---------------------------------------------------------------------------------------------------------
def one_row(
    x: torch.Tensor,  # [1, depth]
    weight: QuantisedWeight | MixedWeight,
    *,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    tile: RowTile | None = None,
    num_processors: int = 0,  # multiprocessors of a GPU; 0: there is none
    is_first: bool = False,  # of a pass
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[1, outputs]"""
    if isinstance(weight, MixedWeight):
        own: dict[str, Any] = {"norm": norm, "num_processors": num_processors, "is_first": is_first}
        return _one_by_one(one_row, x, weight, bias, residual, activation, out_dtype, own)
    outputs, depth = weight.shape
    outputs = outputs if activation is None else outputs // 2
    if out is None:
        out = torch.empty((1, outputs), dtype=out_dtype or x.dtype, device=x.device)
    codes = weight.constants()
    operands: dict[str, Any] = {"norm": norm, "residual": residual, "num_processors": num_processors, "codes": codes}
    if num_processors and tile is None and can_multiply(x, weight.rows, gated=activation is not None, **operands):
        kind = NO_ACTIVATION if activation is None else ACTIVATIONS[activation]
        return row_product(
            x, weight.rows, bias=bias, activation=kind, out_dtype=out.dtype, is_first=is_first, out=out, **operands
        )
    tile = tile or one_row_tile(outputs)
    one_row_kernel[(triton.cdiv(outputs, tile.outputs),)](
        x,
        *weight.arrays(),
        x if norm is None else norm.weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        outputs,
        0.0 if norm is None else norm.eps,
        DEPTH=depth,
        **codes,
        OUTPUTS=tile.outputs,
        BLOCK=max(min(tile.depth, triton.next_power_of_2(depth)), weight.layout.group),
        HAS_NORM=norm is not None,
        **fused(bias, residual, activation),
        num_warps=tile.warps,
        **OVERLAPPED,
    )
    return out


def few_rows(
    x: torch.Tensor,  # [rows, depth]
    weight: QuantisedWeight | MixedWeight,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    tile: RowTile | None = None,
    fixed: bool = False,  # same tiles for any number of rows: results do not depend on the batch
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[rows, outputs]; correct for any number of rows, fast for few."""
    if isinstance(weight, MixedWeight):
        return _one_by_one(few_rows, x, weight, bias, residual, activation, out_dtype, {"tile": tile, "fixed": fixed})
    num_rows, depth = x.shape
    outputs = weight.shape[0] if activation is None else weight.shape[0] // 2
    codes, kind = weight.constants(), NO_ACTIVATION if activation is None else ACTIVATIONS[activation]
    if out is None:
        out = torch.empty((num_rows, outputs), dtype=out_dtype or x.dtype, device=x.device)
    if tile is None and not fixed and code_product.can_multiply(x, residual, bias, out, codes):
        code_product.multiply(x, weight.rows, codes, out, bias=bias, residual=residual, activation=kind)
        return out
    if tile is None:
        is_coded = weight.layout.low != 8
        tile = few_rows_tile(num_rows, outputs, depth, x.dtype, is_coded, gated=activation is not None, fixed=fixed)
    rows = tile.rows if fixed else min(max(16, triton.next_power_of_2(num_rows)), tile.rows)
    grid = triton.cdiv(outputs, tile.outputs), triton.cdiv(num_rows, rows), tile.splits
    few_rows_kernel[grid](
        x,
        *weight.arrays(),
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        *shared_tiles(grid, rows * tile.outputs * (1 if activation is None else 2), out),
        num_rows,
        outputs,
        x.stride(0),
        out.stride(0),
        DEPTH=depth,
        **codes,
        SPLITS=tile.splits,
        ROWS=rows,
        OUTPUTS=tile.outputs,
        BLOCK=max(tile.depth, weight.layout.group),
        STAGES=tile.stages,
        SWAPPED=tile.swapped,
        **fused(bias, residual, activation),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **OVERLAPPED,
    )
    return out


def _one_by_one(
    multiply: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: MixedWeight,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None,
    own: dict[str, Any],
) -> torch.Tensor:
    """Each part writes its columns of the result. Gates and up projections are f32 until they are multiplied."""
    out_dtype = out_dtype or x.dtype
    kept = out_dtype if activation is None else torch.float32
    out, start = torch.empty((x.shape[0], weight.shape[0]), dtype=kept, device=x.device), 0
    for part in weight.parts:
        stop = start + part.shape[0]
        multiply(
            x, part, bias=None if bias is None else bias[start:stop],
            residual=None if residual is None else residual[:, start:stop], out=out[:, start:stop], **own,
        )  # fmt: skip
        start = stop
    return out if activation is None else act_mul(out, activation).to(out_dtype)


def dequantise(
    weight: QuantisedWeight | MixedWeight, dtype: torch.dtype, *, rows: torch.Tensor | None = None, factor: float = 1.0
) -> torch.Tensor:
    """[n, depth]: the dequantised matrix, or the given rows of it, times `factor`."""
    depth = weight.shape[1]
    parts = weight.parts if isinstance(weight, MixedWeight) else (weight,)
    if rows is not None and len(parts) > 1:
        raise ValueError("rows of matrices in several formats cannot be looked up")
    count = weight.shape[0] if rows is None else int(rows.shape[0])
    out, start = torch.empty((count, depth), dtype=dtype, device=parts[0].rows.device), 0
    for part in parts:
        stop = start + (part.shape[0] if rows is None else count)
        if stop > start:
            _dequantise(part, out[start:stop], rows, factor)
        start = stop
    return out


def _dequantise(weight: QuantisedWeight, out: torch.Tensor, rows: torch.Tensor | None, factor: float) -> None:
    (count, depth), together = out.shape, 1 if rows is not None else 4
    block = max(min(triton.next_power_of_2(depth), 1024), weight.layout.group)
    dequantise_kernel[(triton.cdiv(count, together), triton.cdiv(depth, block))](
        *weight.arrays(),
        out if rows is None else rows,
        out,
        count,
        float(factor),
        DEPTH=depth,
        **weight.constants(),
        OUTPUTS=together,
        BLOCK=block,
        LOOKS_UP=rows is not None,
        num_warps=4,
        **OVERLAPPED,
    )


def one_row_tile(outputs: int) -> RowTile:
    """Tiles of GPUs without `row_codes.cu`."""
    if INTERPRETED:
        return RowTile(64, 64, 4)
    return RowTile(4 if outputs >= 2048 else 2, 1024, 4)


def few_rows_tile(
    rows: int, outputs: int, depth: int, dtype: torch.dtype, is_coded: bool, *, gated: bool, fixed: bool
) -> RowTile:
    """As measured on an H200 with the products of the 8B shape, at 16 and 64 rows. `is_coded`: less than 8 bits."""
    if INTERPRETED:
        return RowTile(64, 64, 4, rows=FIXED_ROWS)
    if dtype == torch.float32:
        return RowTile(32, 32, 4, 2, rows=FIXED_ROWS)
    if fixed:
        return RowTile(64, 128, 4, 4, swapped=True, rows=FIXED_ROWS)
    if rows <= 16 and gated and is_coded:
        return RowTile(64, 128, 4, 3, splits=_splits(triton.cdiv(outputs, 64), depth, 2), rows=FIXED_ROWS)
    if rows <= 16:
        return RowTile(32, 256, 4, 3, splits=_splits(triton.cdiv(outputs, 32), depth, 2), rows=FIXED_ROWS)
    if gated and not is_coded:
        return RowTile(64, 128, 4, 3, swapped=True, rows=FIXED_ROWS)
    splits = 1 if gated else _splits(triton.cdiv(outputs, 128), depth, 4)
    return RowTile(128, 128, 8, 3, swapped=True, splits=splits, rows=FIXED_ROWS)


def _splits(tiles: int, depth: int, wanted: int) -> int:
    """Programs that share the depth of a tile: `wanted`, or more of few tiles; each has 256 columns or more."""
    return max(min(max(wanted, 128 // tiles), 8, depth // 256), 1)


# -- the kernel set's part ---------------------------------------------------------------------------------------------
class PackedWeights:
    """Prepares weights: quantised ones stay so, all others become dense tensors (`TorchKernels`).

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
            if not usable(parts, mixed=True):
                prepared = self._torch.prepare_linear(replace(linear, parts=parts))
                release(linear.parts)
                return prepared
            weight = store(parts, self._torch.device)
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
        if not isinstance(weight, QuantisedWeight | MixedWeight):
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


def usable(parts: tuple[Any, ...], *, mixed: bool = False) -> bool:
    """Whether these matrices, which share their input, can stay quantised: in one format, or in several if `mixed`."""
    formats = {part.format if isinstance(part, QuantizedTensor) else None for part in parts}
    return (mixed or len(formats) == 1) and all(format in LAYOUTS for format in formats)


def _is_tied(linear: Linear, table: Any) -> bool:
    """Whether the head is the embedding table: one copy in memory is used for both."""
    return len(linear.parts) == 1 and linear.parts[0] is table
