"""Tensors stored in a `QuantFormat`: views of a mapped file, and the weight matrices of linear layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bifolio.errors import ConfigError, ModelFileError
from bifolio.quant.formats import Bytes, Floats, QuantFormat, decode_blocks, encode_blocks, refuse_non_finite

# Rows that `matmul` dequantises at a time: 512 rows of 4096 values are 8 MB.
PANEL_ROWS = 512


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A tensor in any format, including dense ones; values are dequantised on use.

    The last dimension is contiguous and divided into blocks. A matrix of a linear layer has shape (n, k), [out, in].
    Loaders return tensors as views of the mapped file, in the format of the file.
    """

    format: QuantFormat
    data: Bytes  # u8[rows, row_bytes]  C order; may be a read-only map of a file
    shape: tuple[int, ...]  # logical shape; rows = product of all dimensions but the last
    name: str = "the tensor"  # used in error messages

    def __post_init__(self) -> None:
        expected = (self._rows_of(self.shape), self.format.row_bytes(self.shape[-1] if self.shape else 1))
        if self.data.dtype != np.uint8 or self.data.shape != expected:
            raise ModelFileError(
                f"a {self.format.name} tensor of shape {self.shape} needs bytes of shape {expected}, "
                f"got {self.data.dtype} of shape {self.data.shape}"
            )

    @classmethod
    def quantize(cls, array: ArrayLike, format: QuantFormat, name: str = "the tensor") -> QuantizedTensor:
        """Encode floats; a NaN or an infinity raises a ModelFileError with its position."""
        values = np.ascontiguousarray(array, dtype=np.float32)
        shape = np.shape(array)
        refuse_non_finite(values, name)
        row_bytes = format.row_bytes(shape[-1] if shape else 1)
        blocks = encode_blocks(values.reshape(-1, format.block_elements), format)
        return cls(format, blocks.reshape(cls._rows_of(shape), row_bytes), shape, name)

    @classmethod
    def from_array(cls, array: NDArray[Any]) -> QuantizedTensor:
        """Wrap a contiguous float32 or float16 array without a copy; other types are converted to F32."""
        format = QuantFormat.F16 if array.dtype == np.float16 else QuantFormat.F32
        values = np.ascontiguousarray(array, np.float16 if format is QuantFormat.F16 else np.float32)
        shape = array.shape
        last = shape[-1] if shape else 1
        data = values.reshape(cls._rows_of(shape), last).view(np.uint8)
        return cls(format, data, shape)

    @staticmethod
    def _rows_of(shape: Sequence[int]) -> int:
        return math.prod(shape[:-1])

    @property
    def stored(self) -> Bytes:
        """The bytes as they lie in the file or in memory."""
        return self.data

    def held(self) -> QuantizedTensor:
        """This tensor with its bytes in memory or in a map, for several accesses."""
        return self

    @property
    def num_rows(self) -> int:
        return self._rows_of(self.shape)

    @property
    def num_blocks(self) -> int:
        return self.nbytes // self.format.block_bytes

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.format.bytes_for(self.shape)

    @property
    def memory_ratio(self) -> float:
        """Size of the tensor in F32 divided by its size."""
        return 4 * self.size / self.nbytes if self.nbytes else 1.0

    def dequantize(self) -> Floats:
        """f32[shape]. For F32 this is a view of `data`, which may be read-only."""
        return self._decode(self.data).reshape(self.shape)

    def dequantize_block(self, block_index: int) -> Floats:
        """f32[block_elements]: the values of one block; blocks are numbered in row-major order."""
        if not 0 <= block_index < self.num_blocks:
            raise ConfigError(f"block {block_index} does not exist: the tensor has {self.num_blocks} blocks")
        data, width = self.data, self.format.block_bytes
        row, column = divmod(block_index, data.shape[1] // width)
        block = data[row, column * width : (column + 1) * width]
        return decode_blocks(block.copy()[None], self.format).reshape(-1)

    def dequantize_rows(self, rows: slice | NDArray[np.integer[Any]]) -> Floats:
        """f32[len(rows), k]: an embedding lookup (an array of row numbers) or a panel of a matrix product (a slice)."""
        return self._decode(self.data[rows])

    def matmul(self, x: Floats) -> Floats:
        """x @ W.T: f32[..., k] -> f32[..., n]. Dequantises at most PANEL_ROWS rows of W at a time."""
        if len(self.shape) != 2 or x.shape[-1] != self.shape[1]:
            raise ConfigError(f"cannot multiply values of shape {x.shape} by a weight of shape {self.shape}")
        flat, held = np.ascontiguousarray(x, np.float32).reshape(-1, self.shape[1]), self.held()
        result = np.empty((flat.shape[0], self.shape[0]), np.float32)
        for start in range(0, self.shape[0], PANEL_ROWS):
            panel = slice(start, start + PANEL_ROWS)
            result[:, panel] = flat @ held.dequantize_rows(panel).T
        return result.reshape(*x.shape[:-1], self.shape[0])

    def converted(self, format: QuantFormat, name: str | None = None) -> QuantizedTensor:
        """Convert to another format, PANEL_ROWS rows at a time; `self` if it has that format already."""
        if format is self.format:
            return self
        last, held = self.shape[-1] if self.shape else 1, self.held()
        data = np.empty((self.num_rows, format.row_bytes(last)), np.uint8)
        for start in range(0, self.num_rows, PANEL_ROWS):
            panel = slice(start, start + PANEL_ROWS)
            data[panel] = QuantizedTensor.quantize(held.dequantize_rows(panel), format, name or self.name).data
        return QuantizedTensor(format, data, self.shape, name or self.name)

    def select_rows(self, rows: slice | NDArray[np.integer[Any]]) -> QuantizedTensor:
        """A matrix of the selected rows in the given order; a view if `rows` is a slice. Quantised rows are allowed."""
        data = self.data[rows]
        return QuantizedTensor(self.format, data, (data.shape[0], self.shape[-1]), self.name)

    def select_columns(self, start: int, stop: int) -> QuantizedTensor:
        """A matrix of the columns [start, stop), which begin and end on borders of blocks; a view."""
        self.check_columns(start, stop)
        size, width = self.format.block_elements, self.format.block_bytes
        data = self.data[:, start // size * width : stop // size * width]
        return QuantizedTensor(self.format, data, (data.shape[0], stop - start), self.name)

    def check_columns(self, start: int, stop: int) -> None:
        """Raise a ConfigError unless the columns [start, stop) are whole blocks."""
        size = self.format.block_elements
        if start % size or stop % size:
            raise ConfigError(
                f"columns {start} to {stop} of {self.name} do not lie on borders of blocks of {size} values"
            )

    def reshape(self, *shape: int) -> QuantizedTensor:
        """View quantised rows with other leading dimensions, or dense values with any dimensions."""
        self.check_reshape(shape)
        row_bytes = self.format.row_bytes(shape[-1] if shape else 1)
        return QuantizedTensor(self.format, self.data.reshape(self._rows_of(shape), row_bytes), shape, self.name)

    def check_reshape(self, shape: tuple[int, ...]) -> None:
        """Raise a ConfigError unless `shape` has as many values."""
        if math.prod(shape) != self.size:
            raise ConfigError(f"a tensor of shape {self.shape} cannot be reshaped to {shape}")

    def transposed(self) -> QuantizedTensor:
        """Transposed copy of a dense matrix. Quantised blocks cannot be transposed without loss."""
        if self.format.is_quantized or len(self.shape) != 2:
            raise ConfigError(f"only dense matrices can be transposed, not {self.format.name} of shape {self.shape}")
        n, k = self.shape
        words = self.data.view(np.dtype(f"u{self.format.block_bytes}"))
        data = np.ascontiguousarray(words.T).view(np.uint8)
        return QuantizedTensor(self.format, data, (k, n), self.name)

    def _decode(self, rows: Bytes) -> Floats:
        contiguous = np.ascontiguousarray(rows)
        values = decode_blocks(contiguous.reshape(-1, self.format.block_bytes), self.format)
        return values.reshape(rows.shape[0], -1) if rows.shape[0] else values.reshape(0, self._row_elements(rows))

    def _row_elements(self, rows: Bytes) -> int:
        return int(rows.shape[1]) // self.format.block_bytes * self.format.block_elements

    def __repr__(self) -> str:
        return f"QuantizedTensor({self.format.name}, shape={self.shape}, {self.nbytes} bytes)"


def concatenate_rows(tensors: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Stack matrices of one format and width by rows into one copy."""
    formats = {tensor.format for tensor in tensors}
    widths = {tensor.shape[-1] for tensor in tensors}
    if len(formats) != 1 or len(widths) != 1:
        raise ConfigError(f"cannot stack rows of different formats or widths: {list(tensors)}")
    data = np.concatenate([tensor.data for tensor in tensors])
    return QuantizedTensor(tensors[0].format, data, (data.shape[0], widths.pop()))
