"""The numeric formats of weights, with the byte layouts of GGML.

A format divides the last dimension of a tensor into blocks of `block_elements` values, stored in `block_bytes` bytes.
Six formats can be written as well as read:

    F32, F16, BF16   one value per block
    Q8_0   |d: f16|32 x int8|                  34 bytes   value = d * q
    Q4_0   |d: f16|16 bytes of nibbles|        18 bytes   value = d * (q - 8)
    Q4_1   |d: f16|m: f16|16 bytes of nibbles| 20 bytes   value = d * q + m

Low nibbles are the elements 0-15 of a block, high nibbles the elements 16-31. Conversions run in float32 with the
same rounding as GGML's reference code, so files are interchangeable.

The gguf package decodes the other quantised formats; it is imported when the first such block is decoded. Names and
block sizes are stored here, so that opening and listing a file does not need the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bifolio.errors import ConfigError, ModelFileError, UnsupportedModelError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
BF16_NAN = np.uint16(0x7FC0)


class _Layout(NamedTuple):
    ggml_type: int
    block_elements: int
    block_bytes: int


class QuantFormat(Enum):
    """A GGML type: its name, its number in a GGUF file, and the size of its blocks.

    Tensors of every type can be listed, those of `is_readable` types decoded, those of `is_encodable` types written.
    `KernelSet.formats` lists the types that a device multiplies directly.
    """

    F32 = _Layout(0, 1, 4)
    F16 = _Layout(1, 1, 2)
    BF16 = _Layout(30, 1, 2)
    Q8_0 = _Layout(8, 32, 34)
    Q4_0 = _Layout(2, 32, 18)
    Q4_1 = _Layout(3, 32, 20)
    # -- read but never written
    F64 = _Layout(28, 1, 8)
    I8 = _Layout(24, 1, 1)
    I16 = _Layout(25, 1, 2)
    I32 = _Layout(26, 1, 4)
    I64 = _Layout(27, 1, 8)
    Q5_0 = _Layout(6, 32, 22)
    Q5_1 = _Layout(7, 32, 24)
    Q2_K = _Layout(10, 256, 84)
    Q3_K = _Layout(11, 256, 110)
    Q4_K = _Layout(12, 256, 144)
    Q5_K = _Layout(13, 256, 176)
    Q6_K = _Layout(14, 256, 210)
    IQ1_S = _Layout(19, 256, 50)
    IQ1_M = _Layout(29, 256, 56)
    IQ2_XXS = _Layout(16, 256, 66)
    IQ2_XS = _Layout(17, 256, 74)
    IQ2_S = _Layout(22, 256, 82)
    IQ3_XXS = _Layout(18, 256, 98)
    IQ3_S = _Layout(21, 256, 110)
    IQ4_NL = _Layout(20, 32, 18)
    IQ4_XS = _Layout(23, 256, 136)
    TQ1_0 = _Layout(34, 256, 54)
    TQ2_0 = _Layout(35, 256, 66)
    MXFP4 = _Layout(39, 32, 17)
    NVFP4 = _Layout(40, 64, 36)
    # -- listed but not decoded; GGML uses the first two for activations
    Q8_1 = _Layout(9, 32, 40)
    Q8_K = _Layout(15, 256, 292)
    Q1_0 = _Layout(41, 128, 18)

    @property
    def ggml_type(self) -> int:
        """The number of this format in a GGUF file."""
        return self.value.ggml_type

    @property
    def block_elements(self) -> int:
        return self.value.block_elements

    @property
    def block_bytes(self) -> int:
        return self.value.block_bytes

    @property
    def is_quantized(self) -> bool:
        return self.block_elements > 1

    @property
    def is_readable(self) -> bool:
        """Whether blocks of this format can be decoded."""
        return self in READABLE_FORMATS

    @property
    def is_encodable(self) -> bool:
        """Whether values can be written in this format."""
        return self in _ENCODERS

    @property
    def activation_format(self) -> QuantFormat:
        """The format of activations in the dot product with weights of this format."""
        return QuantFormat.Q8_0 if self.is_quantized else QuantFormat.F32

    @property
    def bits_per_element(self) -> float:
        return 8 * self.block_bytes / self.block_elements

    def row_bytes(self, num_elements: int) -> int:
        """Bytes of one row; ConfigError if its length is not a multiple of the block."""
        if num_elements % self.block_elements:
            raise ConfigError(
                f"a row of {num_elements} values cannot be stored as {self.name}, which needs a multiple of "
                f"{self.block_elements}: use f16 or f32 for this tensor"
            )
        return num_elements // self.block_elements * self.block_bytes

    def bytes_for(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape."""
        if not shape:
            return self.row_bytes(1)
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1])

    @classmethod
    def parse(cls, name: str) -> QuantFormat:
        """The encodable format called `name` (any case); ConfigError lists the valid names."""
        format = cls.__members__.get(name.strip().upper())
        if format is None or not format.is_encodable:
            problem = f"unknown format {name!r}" if format is None else f"{format.name} can be read but not written"
            raise ConfigError(f"{problem}: use one of {_encodable_names()}")
        return format

    @classmethod
    def from_ggml_type(cls, ggml_type: int) -> QuantFormat | None:
        """The format with this number in GGUF files, or None if the number is unknown."""
        return _BY_GGML_TYPE.get(ggml_type)


_BY_GGML_TYPE = {member.ggml_type: member for member in QuantFormat}

READABLE_FORMATS = frozenset(QuantFormat) - {QuantFormat.Q8_1, QuantFormat.Q8_K, QuantFormat.Q1_0}

# Values converted at a time: large enough to amortise numpy calls, small enough that temporaries fit the CPU cache.
_CHUNK_VALUES = 1 << 18


def encode_blocks(values: Floats, format: QuantFormat) -> Bytes:
    """f32[blocks, block_elements] -> u8[blocks, block_bytes]."""
    if not format.is_encodable:
        raise ConfigError(f"{format.name} can be read but not written: use one of {_encodable_names()}")
    chunk = _CHUNK_VALUES // format.block_elements
    return _in_chunks(_ENCODERS[format], values, np.dtype(np.uint8), format.block_bytes, chunk)


def decode_blocks(blocks: Bytes, format: QuantFormat) -> Floats:
    """u8[blocks, block_bytes] -> f32[blocks, block_elements]; for F32 a view of the same memory."""
    if format is QuantFormat.F32:
        return blocks.view(np.float32)
    if not format.is_readable:
        raise UnsupportedModelError(f"{format.name} cannot be decoded: use a file in another type")
    decode = _DECODERS.get(format) or partial(_decode_with_gguf, format=format)
    chunk = _CHUNK_VALUES // format.block_elements
    return _in_chunks(decode, blocks, np.dtype(np.float32), format.block_elements, chunk)


def refuse_non_finite(values: Floats, name: str) -> None:
    """Raise ModelFileError if `values` holds a NaN or an infinity, which no format can represent usefully."""
    if np.isfinite(values).all():
        return
    position = np.argwhere(~np.isfinite(values))[0]
    value = values[tuple(position)]
    kind = "NaN" if np.isnan(value) else "an infinity"
    where = ", ".join(str(int(index)) for index in position)
    raise ModelFileError(f"{name} holds {kind} at [{where}]: the file is damaged or its training diverged")


def _encodable_names() -> str:
    return ", ".join(format.name.lower() for format in ENCODABLE_FORMATS)


def _in_chunks(
    convert: Callable[[Any], Any], source: NDArray[Any], dtype: np.dtype[Any], width: int, chunk: int
) -> NDArray[Any]:
    count = source.shape[0]
    result = np.empty((count, width), dtype)
    for start in range(0, count, chunk):
        result[start : start + chunk] = convert(source[start : start + chunk])
    return result


def _encode_f32(values: Floats) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


def _encode_f16(values: Floats) -> Bytes:
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values).astype(np.float16).view(np.uint8)


def _decode_f16(blocks: Bytes) -> Floats:
    with np.errstate(invalid="ignore"):  # no warning for a signalling NaN in a damaged file
        return blocks.view(np.float16).astype(np.float32)


def f32_to_bf16(values: ArrayLike) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even; infinities are kept, a NaN becomes a quiet NaN of the same sign.

    numpy has no bfloat16: the upper 16 bits of the f32 are stored as uint16.
    """
    floats = np.ascontiguousarray(values, dtype=np.float32).reshape(np.shape(values))
    bits = floats.view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16).astype(np.uint16)
    nans = np.isnan(floats)
    if nans.any():  # the addition could carry the payload of a NaN into infinity or into the sign
        rounded = np.where(nans, (bits >> 16).astype(np.uint16) | np.uint16(0x40), rounded)
    return rounded


def bf16_to_f32(bits: ArrayLike) -> Floats:
    """The exact f32 value of each bfloat16."""
    return (np.asarray(bits, dtype=np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _encode_bf16(values: Floats) -> Bytes:
    return f32_to_bf16(values).view(np.uint8)


def _decode_bf16(blocks: Bytes) -> Floats:
    return bf16_to_f32(blocks.view(np.uint16))


def _inverse(scale: Floats) -> Floats:
    """1 / scale, and 0 for a block of zeros. Subnormal scales overflow to infinity, as in GGML."""
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _half(scale: Floats) -> Bytes:
    return scale.astype(np.float16).view(np.uint8)


def _encode_q8_0(values: Floats) -> Bytes:
    with np.errstate(all="ignore"):
        scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
        scaled = values * _inverse(scale)
        magnitude = np.abs(scaled)
        whole = np.floor(magnitude)
        # Rounds halves away from zero; `magnitude + 0.5` would also round 0.49999997 up.
        rounded = np.sign(scaled) * (whole + np.floor(2 * (magnitude - whole)))
        return np.concatenate([_half(scale), rounded.astype(np.int8).view(np.uint8)], axis=1)


def _decode_q8_0(blocks: Bytes) -> Floats:
    return _scale_at(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _encode_q4_0(values: Floats) -> Bytes:
    """The value of largest magnitude is encoded as -8, the larger end of the range -8..7."""
    with np.errstate(all="ignore"):
        extreme = np.take_along_axis(values, np.abs(values).argmax(axis=1)[:, None], axis=1)
        scale = extreme / np.float32(-8)
        codes = np.trunc(values * _inverse(scale) + np.float32(8.5))
        return np.concatenate([_half(scale), _pack_nibbles(codes)], axis=1)


def _decode_q4_0(blocks: Bytes) -> Floats:
    return _scale_at(blocks, 0) * (_unpack_nibbles(blocks[:, 2:]) - np.float32(8))


def _encode_q4_1(values: Floats) -> Bytes:
    with np.errstate(all="ignore"):
        lowest = values.min(axis=1, keepdims=True)
        scale = (values.max(axis=1, keepdims=True) - lowest) / np.float32(15)
        codes = np.trunc((values - lowest) * _inverse(scale) + np.float32(0.5))
        return np.concatenate([_half(scale), _half(lowest), _pack_nibbles(codes)], axis=1)


def _decode_q4_1(blocks: Bytes) -> Floats:
    return _scale_at(blocks, 0) * _unpack_nibbles(blocks[:, 4:]) + _scale_at(blocks, 2)


def _scale_at(blocks: Bytes, offset: int) -> Floats:
    return _decode_f16(blocks[:, offset : offset + 2].copy())


def _pack_nibbles(codes: Floats) -> Bytes:
    small: Bytes = codes.astype(np.uint8).clip(0, 15)
    packed: Bytes = small[:, :16] | (small[:, 16:] << np.uint8(4))
    return packed


def _unpack_nibbles(packed: Bytes) -> Floats:
    codes = np.empty((packed.shape[0], 32), np.float32)
    codes[:, :16] = packed & 15
    codes[:, 16:] = packed >> 4
    return codes


def _decode_plain(dtype: str, blocks: Bytes) -> Floats:
    """Convert F64 or integers to f32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return blocks.view(dtype).astype(np.float32)


def _decode_with_gguf(blocks: Bytes, format: QuantFormat) -> Floats:
    import gguf  # slow to import and rarely needed

    try:
        with np.errstate(all="ignore"):  # damaged scales give infinities, which callers reject
            row = blocks.reshape(1, -1)  # one row, because the package processes 16 rows at a time
            values: Floats = gguf.quants.dequantize(row, gguf.GGMLQuantizationType(format.ggml_type))
    except (NotImplementedError, ValueError):
        raise UnsupportedModelError(
            f"the installed gguf package cannot decode {format.name}: upgrade it, or use a file in another type"
        ) from None
    return values.reshape(blocks.shape[0], format.block_elements)


_ENCODERS: dict[QuantFormat, Callable[[Floats], Bytes]] = {
    QuantFormat.F32: _encode_f32,
    QuantFormat.F16: _encode_f16,
    QuantFormat.BF16: _encode_bf16,
    QuantFormat.Q8_0: _encode_q8_0,
    QuantFormat.Q4_0: _encode_q4_0,
    QuantFormat.Q4_1: _encode_q4_1,
}
ENCODABLE_FORMATS = tuple(_ENCODERS)

_DECODERS: dict[QuantFormat, Callable[[Bytes], Floats]] = {
    QuantFormat.F16: _decode_f16,
    QuantFormat.BF16: _decode_bf16,
    QuantFormat.Q8_0: _decode_q8_0,
    QuantFormat.Q4_0: _decode_q4_0,
    QuantFormat.Q4_1: _decode_q4_1,
    QuantFormat.F64: partial(_decode_plain, "<f8"),
    QuantFormat.I8: partial(_decode_plain, "i1"),
    QuantFormat.I16: partial(_decode_plain, "<i2"),
    QuantFormat.I32: partial(_decode_plain, "<i4"),
    QuantFormat.I64: partial(_decode_plain, "<i8"),
}
