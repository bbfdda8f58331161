# mypy: disallow-untyped-decorators=False
"""Tiles of matrices, loaded through pointers or through TMA.

From Hopper on, the tensor memory accelerator (TMA) of a GPU loads a tile into shared memory by a descriptor of the
matrix and the coordinates of the tile. No thread computes an address, and elements outside the matrix are zero.
Descriptors are arguments of the launch, also in a CUDA graph; none is kept, since it would outlive its tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # a Triton without descriptors: every tile is loaded through pointers
    TensorDescriptor = None

ALIGNMENT = 16  # bytes: of the matrix, and of its rows


def can_be_described(matrix: torch.Tensor) -> bool:
    """Whether the device has TMA and can load this matrix with it (values of 8 or 16 bits, aligned)."""
    size = matrix.element_size()
    return (
        size <= 2
        and matrix.stride(1) == 1
        and matrix.stride(0) * size % ALIGNMENT == 0
        and matrix.data_ptr() % ALIGNMENT == 0
        and _has_copy_engine(matrix.device)
    )


@cache
def _has_copy_engine(device: torch.device) -> bool:
    if TensorDescriptor is None:
        return False
    if triton.knobs.runtime.interpret:
        return True
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def describe(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    """A descriptor for tiles of `rows` by `columns`. The thread must have used the device before."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@triton.jit
def load_tile(
    source: tl.tensor,  # the matrix's descriptor, or pointers [rows, 1] to the rows of the tile
    first: tl.tensor,  # row of the tile, for a descriptor
    exists: tl.tensor,  # bool[rows], for pointers; a descriptor holds the bounds of its matrix
    start: tl.tensor,  # column
    DEPTH: tl.constexpr,  # columns of the matrix
    BLOCK: tl.constexpr,  # columns of the tile
    DESCRIBED: tl.constexpr,
) -> tl.tensor:
    """[rows, BLOCK], zeros beyond the last column."""
    if DESCRIBED:
        tile = source.load([first, start])
    else:
        column = start + tl.arange(0, BLOCK)
        if DEPTH % BLOCK == 0:
            tile = tl.load(source + column[None, :], mask=exists[:, None], other=0.0)
        else:
            tile = tl.load(source + column[None, :], mask=exists[:, None] & (column < DEPTH)[None, :], other=0.0)
    return tile
