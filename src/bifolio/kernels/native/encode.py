"""Blocks of files by the native code: floats to formats that need a search for scales, and any format to floats."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bifolio.errors import MissingDependencyError, ModelFileError
from bifolio.kernels.native.formats import FORMAT_CODES, NATIVE_FORMATS, format_code
from bifolio.kernels.native.library import library
from bifolio.quant.formats import Bytes, Floats, QuantFormat, refuse_non_finite
from bifolio.quant.tensor import QuantizedTensor

SEARCHED_FORMATS = frozenset(QuantFormat[name] for name in ("Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"))
PLAIN_FORMATS = frozenset({QuantFormat.Q8_0, QuantFormat.Q4_0, QuantFormat.Q4_1})  # one way to round, as in numpy
CODE_ORDERS = ("packed", "gptq", "awq")  # by their numbers in native/module_formats.cpp
_LARGEST = 65504.0  # a half float, as scales are
_PANEL_VALUES = 1 << 22  # that exist as floats at a time


def decode_rows(tensor: QuantizedTensor, rows: slice) -> Floats:
    """f32[len(rows), k]: rows of a tensor as floats."""
    if tensor.format not in NATIVE_FORMATS:
        return tensor.dequantize_rows(rows)
    native = library()
    data = np.ascontiguousarray(tensor.data[rows])
    values = np.empty((data.shape[0], tensor.shape[-1]), np.float32)
    if len(data):
        native.dequantize(format_code(native, tensor.format), data, tensor.shape[-1], values)
    return values


def decode_fp8(codes: Bytes, scales: Floats, block: tuple[int, int]) -> Bytes | None:
    """u8[rows, 2 k]: E4M3 codes u8[rows, k] times the scales of their blocks, as bfloat16; None if one is no number.

    Raises MissingDependencyError if the native kernels are not built.
    """
    decoded = np.empty((codes.shape[0], 2 * codes.shape[1]), np.uint8)
    inputs = np.ascontiguousarray(codes), np.ascontiguousarray(scales, np.float32)
    return decoded if library().decode_fp8(*inputs, *block, decoded) else None


def pack_codes(method: str, words: Bytes, headers: Bytes, header_bytes: int, out: Bytes) -> None:
    """Codes of 4 bits in words of 32, and the headers of their groups, as blocks of Q4_0 or Q4_1: u8[rows, row_bytes].

    `words`: packed u8[rows, columns / 2]; gptq u8[columns / 8, rows * 4]; awq u8[columns, rows / 2]. Headers have 2
    bytes (Q4_0) or 4 for each group: u8[rows, groups * header_bytes].
    Raises MissingDependencyError if the native kernels are not built.
    """
    library().pack_codes(
        CODE_ORDERS.index(method), np.ascontiguousarray(words), np.ascontiguousarray(headers), header_bytes, out
    )


def encode_rows(values: Floats, format: QuantFormat, importance: NDArray[np.float32] | None = None) -> Bytes:
    """f32[rows, k] -> u8[rows, row_bytes] in a searched or plain format; `importance`, f32[k], weighs errors."""
    rows = np.ascontiguousarray(values, np.float32)
    out = np.empty((rows.shape[0], format.row_bytes(rows.shape[1])), np.uint8)
    weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
    if len(rows):
        library().encode(FORMAT_CODES[format.name], rows, weights, out)
    return out


def encoded(
    tensor: QuantizedTensor, format: QuantFormat, name: str, importance: NDArray[np.float32] | None = None
) -> QuantizedTensor:
    """A matrix in a searched or plain format, some rows at a time; NaN and infinities are refused by name."""
    if tensor.format is format:
        return tensor
    data = np.empty((tensor.num_rows, format.row_bytes(tensor.shape[-1])), np.uint8)
    tensor = tensor.held()
    for panel in _panels(tensor):
        values = decode_rows(tensor, panel)
        refuse_non_finite(values, name)
        if format in SEARCHED_FORMATS and max(values.max(initial=0), -values.min(initial=0)) > _LARGEST:
            raise ModelFileError(f"{name} holds values too large for {format.name}: use f32 or bf16")
        data[panel] = encode_rows(values, format, importance)
    return QuantizedTensor(format, data, tensor.shape, name)


def quickly_converted(tensor: QuantizedTensor, format: QuantFormat, name: str | None = None) -> QuantizedTensor:
    """`tensor.converted(format, name)`, with the same values, by native code where there is some."""
    if tensor.format not in NATIVE_FORMATS or format not in PLAIN_FORMATS or len(tensor.shape) != 2:
        return tensor.converted(format, name)
    try:
        return encoded(tensor, format, name or tensor.name or "")
    except MissingDependencyError:
        return tensor.converted(format, name)


def _panels(tensor: QuantizedTensor) -> Iterator[slice]:
    step = max(1, _PANEL_VALUES // tensor.shape[-1])
    return (slice(start, start + step) for start in range(0, tensor.num_rows, step))
