"""Matrices in FP8 (E4M3): bytes and the scales of their rows or blocks, or dense ones that shall become FP8.

    weight[r, c] = number(stored[r, c]) * scales[r // rows of a block, c // columns of a block]

To a kernel set without FP8 both are matrices in bfloat16 or in the format of the file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.quant.formats import Bytes, Floats, QuantFormat
from bifolio.quant.late_tensor import LateTensor
from bifolio.quant.tensor import QuantizedTensor

READ_AS = QuantFormat.BF16  # by kernel sets without FP8
LARGEST = 448.0  # the largest number of E4M3
Decode = Callable[[Bytes, Floats, tuple[int, int]], Bytes]  # (bytes, scales, block) -> bytes of bfloat16


class Fp8Tensor(LateTensor):
    """A matrix of a folder, decoded to bfloat16 at each access to `data`.

    `scales` is f32[row blocks, column blocks]; rows and columns of the matrix can be chosen without decoding.
    """

    __slots__ = ("_as_bf16", "block", "scales")
    scales: Floats
    block: tuple[int, int]
    _as_bf16: Decode

    def __init__(self, name: str, stored: Bytes, scales: Floats, block: tuple[int, int], decode: Decode) -> None:
        super().__init__(READ_AS, stored.shape, name, stored, lambda: decode(stored, scales, block))
        for field, value in {"scales": scales, "block": block, "_as_bf16": decode}.items():
            object.__setattr__(self, field, value)

    def row_scales(self) -> Floats:
        """f32[rows, column blocks]"""
        return np.repeat(self.scales, self.block[0], axis=0)[: self.num_rows]

    def select_rows(self, rows: slice | NDArray[np.integer[Any]]) -> QuantizedTensor:
        scales = np.ascontiguousarray(self.row_scales()[rows])
        return Fp8Tensor(self.name, self.stored[rows], scales, (1, self.block[1]), self._as_bf16)

    def select_columns(self, start: int, stop: int) -> QuantizedTensor:
        self.check_columns(start, stop)
        height, width = self.block
        stored = self.stored[:, start:stop]
        if self.scales.shape[1] == 1:
            return Fp8Tensor(self.name, stored, self.scales, (height, max(stop - start, 1)), self._as_bf16)
        if start % width:
            return super().select_columns(start, stop)
        scales = np.ascontiguousarray(self.scales[:, start // width : -(-stop // width)])
        return Fp8Tensor(self.name, stored, scales, self.block, self._as_bf16)


class DenseToFp8(LateTensor):
    """A dense matrix that a kernel set with FP8 stores in it, with a scale for each row."""

    __slots__ = ("dense",)
    dense: QuantizedTensor

    def __init__(self, dense: QuantizedTensor) -> None:
        super().__init__(dense.format, dense.shape, dense.name, dense.stored, lambda: dense.data)
        object.__setattr__(self, "dense", dense)

    def select_rows(self, rows: slice | NDArray[np.integer[Any]]) -> QuantizedTensor:
        return DenseToFp8(self.dense.select_rows(rows))

    def select_columns(self, start: int, stop: int) -> QuantizedTensor:
        return DenseToFp8(self.dense.select_columns(start, stop))
