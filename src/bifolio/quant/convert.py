"""Conversion of weights from the format of a file to a format that a kernel set multiplies directly.

    Q4_K                     -> Q4_1, with the same codes
    other quantised formats  -> Q8_0, with negligible additional error
    F64, integers            -> F32

A kernel set lists the formats that it multiplies directly (`KernelSet.formats`) and converts the others when it
prepares the weights. Memory plans and notes depend on the formats alone; they convert nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import numpy as np

from bifolio.errors import ConfigError
from bifolio.quant.formats import Bytes, Floats, QuantFormat
from bifolio.quant.tensor import QuantizedTensor

DENSE_FORMATS = frozenset({QuantFormat.F32, QuantFormat.F16, QuantFormat.BF16})
Rewrite = Callable[[QuantizedTensor, QuantFormat], QuantizedTensor]
_Q4_K_CHUNK = 4096  # blocks of 256 values that are converted at a time


class HeldFormats(frozenset[QuantFormat]):
    """The formats that a kernel set takes, with the bits of a value as it holds them: packing may round up."""

    held_bits: Mapping[QuantFormat, float]

    def __new__(cls, held_bits: Mapping[QuantFormat, float]) -> HeldFormats:
        formats = super().__new__(cls, held_bits)
        formats.held_bits = held_bits
        return formats


def target_format(format: QuantFormat, accepted: Set[QuantFormat]) -> QuantFormat:
    """The format in which a kernel set prepares weights of `format`; `format` itself if it is accepted."""
    candidates = [format]
    if format is QuantFormat.Q4_K:
        candidates.append(QuantFormat.Q4_1)
    if format.is_quantized:
        candidates.append(QuantFormat.Q8_0)
    candidates.append(QuantFormat.F32)
    for candidate in candidates:
        if candidate in accepted:
            return candidate
    names = ", ".join(sorted(known.name for known in accepted))
    raise ConfigError(f"{format.name} weights cannot be converted to one of {names}: use other kernels")


def convert(tensor: Any, accepted: Set[QuantFormat], rewrite: Rewrite = QuantizedTensor.converted) -> Any:
    """Convert `tensor` to a format of `accepted`; unchanged if it has one already or is not a `QuantizedTensor`.

    `rewrite` converts where values are rounded again: by numpy, or by faster code with the same result.
    """
    if not isinstance(tensor, QuantizedTensor):
        return tensor
    target = target_format(tensor.format, accepted)
    if tensor.format is QuantFormat.Q4_K and target is QuantFormat.Q4_1:
        return QuantizedTensor(target, _q4_k_as_q4_1(tensor.data), tensor.shape, tensor.name)
    return rewrite(tensor, target)


def converted_bytes(tensor: Any, accepted: Set[QuantFormat]) -> int:
    """Bytes of `convert(tensor, accepted)` as the kernel set holds it, from its format and shape alone."""
    if not isinstance(tensor, QuantizedTensor):
        return int(tensor.nbytes)
    target = target_format(tensor.format, accepted)
    if isinstance(accepted, HeldFormats):
        return int(tensor.size * accepted.held_bits[target] / 8)
    return target.bytes_for(tensor.shape)


def conversion_notes(formats: Iterable[QuantFormat], accepted: Set[QuantFormat], kernels: str) -> list[str]:
    """A line for each format that the kernels called `kernels` convert, with the number of matrices."""
    return [
        f"the {kernels} kernels convert {count} {'matrix' if count == 1 else 'matrices'} of type {format.name} "
        f"to {target.name} at load"
        for format, count in Counter(formats).items()
        if (target := target_format(format, accepted)) is not format
    ]


def _q4_k_as_q4_1(raw: Bytes) -> Bytes:
    """Q4_K: |d: f16|dmin: f16|8 scales and 8 minimums of 6 bits in 12 bytes|128 bytes of nibbles|, 256 values.

    Each 32 bytes of nibbles hold two groups of 32 values: first the low nibbles, then the high ones. The scale and the
    minimum of every group are multiplied out and rounded to f16; the codes are unchanged.
    """
    blocks = raw.reshape(-1, QuantFormat.Q4_K.block_bytes)
    result = np.empty((blocks.shape[0], 8, QuantFormat.Q4_1.block_bytes), np.uint8)
    for start in range(0, blocks.shape[0], _Q4_K_CHUNK):
        panel = slice(start, start + _Q4_K_CHUNK)
        part = blocks[panel]
        halves = part[:, :4].copy().view(np.float16).astype(np.float32)
        scales, minimums = _six_bit_pairs(part[:, 4:16])
        result[panel, :, 0:2] = (halves[:, :1] * scales).astype(np.float16)[..., None].view(np.uint8)
        result[panel, :, 2:4] = (halves[:, 1:] * -minimums).astype(np.float16)[..., None].view(np.uint8)
        packed = part[:, 16:].reshape(-1, 4, 1, 32)
        codes = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)
        result[panel, :, 4:] = codes[..., :16] | (codes[..., 16:] << np.uint8(4))
    return result.reshape(raw.shape[0], -1)


def _six_bit_pairs(packed: Bytes) -> tuple[Floats, Floats]:
    """Scales and minimums, f32[n, 8] each: four in the low 6 bits of a byte, four composed of 4 and 2 bits."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minimums = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), minimums.astype(np.float32)
