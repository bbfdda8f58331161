"""Weights of folders in FP8: bytes of the type E4M3 and the scales of their blocks or rows; and experts in FP4.

name.weight             F8_E4M3[rows, columns]
name.weight_scale_inv   [rows / 128, columns / 128], or
name.weight_scale       [rows, 1], [rows] or one number     weight = byte * scale
name.scale              as the first, in DeepSeek-V4

name.weight             I8[rows, columns / 2]     two codes in a byte, of which the low one is the first
name.scale              F8_E8M0[rows, columns / 32]     that is MXFP4

Scales of the type F8_E8M0 are powers of two: 2 ** (byte - 127).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from bifolio.errors import MissingDependencyError, ModelFileError, UnsupportedModelError
from bifolio.kernels.cpu import decode_fp8
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.huggingface.safetensors_file import Tensors
from bifolio.quant.formats import Bytes, QuantFormat
from bifolio.quant.fp8 import Fp8Tensor
from bifolio.quant.late_tensor import LateTensor
from bifolio.quant.tensor import QuantizedTensor

FP8, FP4, POWER = "F8_E4M3", "I8", "F8_E8M0"  # types in safetensors; those of bytes may name powers, too
POWERS, EXPONENT_BIAS, NO_POWER = (POWER, "U8"), 127, 255
USUAL_BLOCK = (128, 128)
SUFFIXES, WEIGHT, SCALE = ("_scale_inv", "_scale"), ".weight", ".scale"
VALUES_AT_ONCE = 1 << 16  # they stay in the cache of a core
HIGH = 1 if sys.byteorder == "little" else 0  # the half of 32 bits that has the exponent


class StoredTensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    format: str  # or the type in safetensors, where it is not read as it is
    nbytes: int


class FolderMap(Mapping[str, QuantizedTensor]):
    """The tensors of all files of a folder by name; FP8 is decoded when a kernel set takes it."""

    def __init__(self, files: Sequence[Tensors], block: tuple[int, int] = USUAL_BLOCK) -> None:
        self._file_of = {name: file for file in reversed(files) for name in file}
        self._block = block

    def __getitem__(self, name: str) -> QuantizedTensor:
        file = self._file_of[name]
        dtype = file.dtype_of(name)
        if dtype == FP4 and (scale := self._scale_of(name)) is not None:
            powers = self._file_of[scale]
            if powers.dtype_of(scale) not in POWERS:
                raise ModelFileError(f"the scales {scale!r} of FP4 have type {powers.dtype_of(scale)}, not {POWER}")
            return _mxfp4(name, file, powers.bytes_of(scale).reshape(powers.shape_of(scale)))
        if dtype != FP8:
            return file[name]
        return _scaled(name, file.bytes_of(name), file.shape_of(name), self._scales(name), self._block)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def stored(self) -> list[StoredTensor]:
        """Each tensor as it lies in its file."""
        return [
            StoredTensor(name, file.shape_of(name), file.format_of(name), file.bytes_of(name).size)
            for name, file in self._file_of.items()
        ]

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._file_of[name].shape_of(name)

    def words(self, name: str) -> np.ndarray:
        """i32: a tensor of 32-bit integers."""
        file = self._file_of[name]
        if file.dtype_of(name) != "I32":
            raise ModelFileError(f"the tensor {name!r} has type {file.dtype_of(name)}: 32-bit integers are expected")
        found: np.ndarray = file.bytes_of(name).view("<i4").reshape(file.shape_of(name))
        return found

    def _scale_of(self, name: str) -> str | None:
        """The name of a tensor's scales."""
        names = [name + suffix for suffix in SUFFIXES]
        if name.endswith(WEIGHT):
            names.append(name.removesuffix(WEIGHT) + SCALE)
        return next((each for each in names if each in self._file_of), None)

    def _scales(self, name: str) -> np.ndarray:
        found = self._scale_of(name)
        if found is None:
            raise ModelFileError(
                f"the tensor {name!r} is stored in FP8, and its scale {name + SUFFIXES[0]!r} is missing"
            )
        file = self._file_of[found]
        if file.dtype_of(found) not in POWERS:
            return self[found].dequantize()
        powers = file.bytes_of(found).reshape(file.shape_of(found)).astype(np.int32)
        known = powers < NO_POWER
        return np.where(known, np.ldexp(np.float32(1), np.where(known, powers, 0) - EXPONENT_BIAS), np.float32(np.nan))


def _mxfp4(name: str, file: Tensors, scales: np.ndarray) -> LateTensor:
    """A matrix of FP4 codes in the blocks of GGML."""
    shape, size = file.shape_of(name), QuantFormat.MXFP4.block_elements
    if len(shape) != 2 or shape[1] * 2 % size or scales.shape != (shape[0], shape[1] * 2 // size):
        raise ModelFileError(f"the tensor {name!r} of FP4 codes has shape {shape}, and its scales {scales.shape}")
    rows, columns = shape[0], 2 * shape[1]
    stored = file.bytes_of(name)

    def blocks() -> Bytes:
        if (scales == NO_POWER).any():
            raise ModelFileError(f"the scales of the tensor {name!r} are not numbers")
        return ggml_blocks(stored.reshape(rows, columns // size, size // 2), scales).reshape(rows, -1)

    return LateTensor(QuantFormat.MXFP4, (rows, columns), name, stored, blocks)


def ggml_blocks(blocks: Bytes, scales: Bytes) -> Bytes:
    """u8[..., 16] codes and u8[...] scales -> u8[..., 17]: the scale, then the codes j and j + 16 in one byte."""
    codes = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    halves = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], halves], axis=-1)


def _scaled(
    name: str, stored: np.ndarray, shape: tuple[int, ...], scales: np.ndarray, block: tuple[int, int]
) -> Fp8Tensor:
    if len(shape) != 2:
        raise UnsupportedModelError(f"the tensor {name!r} of shape {shape} is stored in FP8: only matrices are read")
    rows, columns = shape
    stored = stored.reshape(shape)
    if scales.shape == (-(-rows // block[0]), -(-columns // block[1])):
        group, width = min(block[0], max(rows, 1)), min(block[1], max(columns, 1))
    elif scales.size in (1, rows):
        group, width = -(-rows // scales.size), columns
    else:
        raise ModelFileError(f"the tensor {name!r} of shape {shape} has FP8 scales of shape {scales.shape}")
    scales = scales.astype(np.float32).reshape(-(-rows // group), -1)
    return Fp8Tensor(name, stored, scales, (group, width), partial(_decoded, name))


def _decoded(name: str, stored: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    stored = np.ascontiguousarray(stored)  # columns of a matrix are a view
    try:
        decoded = decode_fp8(stored, scales, block)
    except MissingDependencyError:
        decoded = decode_without_kernels(stored, scales, block)
    if decoded is None or not np.isfinite(scales).all():
        raise ModelFileError(f"the tensor {name!r} contains values that are not numbers")
    return decoded


def decode_without_kernels(stored: np.ndarray, scales: np.ndarray, block: tuple[int, int]) -> np.ndarray | None:
    """As `decode_fp8` of the CPU kernels."""
    (rows, columns), (group, width) = stored.shape, block
    if ((stored & 127) == 127).any():
        return None
    decoded: np.ndarray = np.empty(stored.shape, np.uint16)
    size = min(max(VALUES_AT_ONCE // max(columns, 1), 1), group)
    for first in range(0, rows, group):
        factors = np.repeat(scales[first // group] * np.float32(256), width)[:columns]
        for start in range(first, min(first + group, rows), size):
            part = slice(start, min(start + size, first + group))
            values = _unscaled(stored[part])
            values *= factors
            bits = values.view(np.uint32)
            bits += ((bits >> 16) & 1) + 0x7FFF  # to the nearest, ties to even
            decoded[part] = bits.view(np.uint16)[:, HIGH::2]
    return decoded.view(np.uint8)


def _unscaled(stored: np.ndarray) -> np.ndarray:
    """f32: the values of bytes, divided by 256. Exponent and mantissa of a byte are the upper ones of a half float."""
    halves = stored.astype(np.uint16)
    halves <<= 8
    signed = halves.view(np.int16)
    signed >>= 1
    halves &= 0xBFFF
    return halves.view(np.float16).astype(np.float32)


def read_block(found: JsonObject) -> tuple[int, int] | None:
    """The blocks of FP8 weights that `quantization_config` describes; None if the weights are of another kind."""
    method = found.get("quant_method")
    is_float = method == "compressed-tensors" and "float" in str(found.get("format"))
    if not is_float and method not in ("fp8", "fbgemm_fp8", "mxfp4"):
        return None
    block = found.counts("weight_block_size") or USUAL_BLOCK
    if len(block) != 2:
        raise found.wrong("weight_block_size", "two positive integers")
    return block[0], block[1]
