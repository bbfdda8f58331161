# mypy: disallow-untyped-decorators=False
"""Tiles of matrices, fetched by address or by description.

From Hopper on a GPU has a copy engine (TMA): it is told once where a matrix lies and how its tiles are cut, and then
fetches a tile by the coordinates of its first element, straight into shared memory. No thread computes an address, and
what lies outside the matrix arrives as zeros. Descriptions travel with the launch, also into a captured step; none is
kept, for it would outlive the tensor that it describes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # a triton without them: every tile is fetched by address
    TensorDescriptor = None

ALIGNMENT = 16  # bytes: of the matrix, and of its rows


def can_be_described(matrix: torch.Tensor) -> bool:
    """Whether the device has a copy engine, and one that can read this matrix of 16-bit numbers."""
    size = matrix.element_size()
    return (
        size == 2
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
    """For a kernel that fetches tiles of so many rows and columns. The thread must have used the device before."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


@triton.jit
def load_tile(
    source: tl.tensor,  # the matrix's description, or pointers [rows, 1] to the rows of the tile
    first: tl.tensor,  # row of the tile, for a description
    exists: tl.tensor,  # bool[rows], for pointers; a description knows where its matrix ends
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
