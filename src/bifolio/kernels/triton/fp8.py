# mypy: disallow-untyped-decorators=False
"""Weights in FP8 (E4M3), used as they are: a GPU reads half of the bytes of bfloat16.

    out = (x @ values.T) * scales

Scales belong to rows, or to groups of columns of rows. Few rows of x are multiplied in their own type: a tile of the
weight is converted in registers, which is exact (`gemv`, `gemm_small_m`, `row_product.cu`). More rows are rounded to
FP8 as well and multiplied by the tensor cores for FP8 (`fp8_rows`). In deterministic mode no row is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from bifolio.errors import ModelFileError
from bifolio.quant.fp8 import LARGEST, DenseToFp8, Fp8Tensor

FP8 = torch.float8_e4m3fn
GROUP = 128  # columns with one scale, of kernels for groups
SMALLEST = 1e-12  # of the largest value of a row, so that rows of zeros have a scale


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix [outputs, depth] on the device."""

    values: torch.Tensor  # e4m3[outputs, depth]
    scales: torch.Tensor  # f32[outputs, groups of columns]

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.numel() + 4 * self.scales.numel()

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return int(self.shape[1]) if self.scales.shape[1] == 1 else GROUP

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        scales = self.scales.repeat_interleave(self.group, dim=1)[:, : self.shape[1]]
        return (self.values.to(torch.float32) * scales).to(dtype)


def can_store(parts: tuple[Any, ...]) -> bool:
    """Whether matrices that share their input stay in FP8, or shall be rounded to it."""
    if all(isinstance(part, DenseToFp8) for part in parts):
        return True
    widths = {part.block[1] if part.scales.shape[1] > 1 else 0 for part in parts if isinstance(part, Fp8Tensor)}
    return all(isinstance(part, Fp8Tensor) for part in parts) and widths in ({0}, {GROUP})


def store(parts: tuple[Any, ...], device: str) -> Fp8Weight:
    """The matrices, one below the other, on the device."""
    each = [_stored(part, device) if isinstance(part, Fp8Tensor) else _rounded(part, device) for part in parts]
    if len(each) == 1:
        return each[0]
    # Concatenated as bytes: torch has few operations on FP8.
    values = torch.cat([weight.values.view(torch.uint8) for weight in each]).view(FP8)
    return Fp8Weight(values, torch.cat([weight.scales for weight in each]))


def _stored(part: Fp8Tensor, device: str) -> Fp8Weight:
    values = torch.from_numpy(np.array(part.stored)).to(device)
    scales = part.row_scales().astype(np.float32)
    if not np.isfinite(scales).all() or bool(((values & 127) == 127).any()):
        raise ModelFileError(f"the tensor {part.name!r} contains values that are not numbers")
    return Fp8Weight(values.view(FP8), torch.from_numpy(np.ascontiguousarray(scales)).to(device))


def _rounded(part: DenseToFp8, device: str) -> Fp8Weight:
    """Round a dense matrix, each row by its largest value."""
    dense = part.dense.held()
    values = as_tensor(dense.data, dense.format.name, dense.shape).to(device)
    scales = (values.abs().amax(dim=1, keepdim=True).float() / LARGEST).clamp_min(SMALLEST)
    if not bool(torch.isfinite(scales).all()):
        raise ModelFileError(f"the tensor {part.name!r} contains values that are not numbers")
    return Fp8Weight((values.float() / scales).to(FP8), scales)


def as_tensor(data: np.ndarray, format: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A dense tensor of the host, without a change of its type."""
    types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    return torch.from_numpy(np.array(data)).view(types[format]).reshape(shape)


def parts_of(weight: torch.Tensor | Fp8Weight) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(values, scales, columns that share a scale) as arguments of a kernel; 0: a weight without scales."""
    return (weight.values, weight.scales, weight.group) if isinstance(weight, Fp8Weight) else (weight, weight, 0)


# -- in kernels with few rows of x -------------------------------------------------------------------------------------
@triton.jit
def scaled(
    weights: tl.tensor,  # [outputs, block]
    scales: tl.tensor,
    row: tl.tensor,  # [outputs]
    column: tl.tensor,  # [block]
    inside: tl.tensor,  # bool[outputs, block]
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """f32[outputs, block]: the weights times the scales of their groups; those of rows are applied to the sums."""
    weights = weights.to(tl.float32)
    if GROUP > 0 and GROUP < DEPTH:
        place = row.to(tl.int64)[:, None] * ((DEPTH + GROUP - 1) // GROUP) + (column // GROUP)[None, :]
        weights = weights * tl.load(scales + place, mask=inside, other=0.0)
    return weights


@triton.jit
def row_scale(scales: tl.tensor, row: tl.tensor, exists: tl.tensor) -> tl.tensor:
    """f32[outputs]"""
    return tl.load(scales + row, mask=exists, other=0.0)


@triton.jit
def group_scale(
    scales: tl.tensor,
    row: tl.tensor,
    exists: tl.tensor,
    start: tl.tensor,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
) -> tl.tensor:
    """f32[outputs]: the scales of the group of columns from `start`; 1 where rows have one scale or none."""
    scale = exists.to(tl.float32)
    if GROUP > 0 and GROUP < DEPTH:
        place = row.to(tl.int64) * ((DEPTH + GROUP - 1) // GROUP) + start // GROUP
        scale = tl.load(scales + place, mask=exists, other=0.0)
    return scale
