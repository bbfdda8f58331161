"""Quantised matrices on the device: rows of codes, in planes of whole words, and factors of groups of columns.

    row      |<- low bits of codes ->|<- high bits ->|<- factors of groups ->|<- factors of 256 columns ->|
    value    scale * code + offset

Each region begins at a multiple of 16 bytes. A plane of B bits has words of 32 / B columns. Byte k of a word has the
columns k, 4 + k, 8 + k, ..., from its lowest bits on: a shift and a mask give four neighbouring columns in four bytes.

    scales         a group                    256 columns
    HALVES         scale f16
    HALF_PAIRS     scale f16, offset f16
    BYTE_PAIRS     scale u8, minimum u8       d f16, dmin f16     scale = d * scale, offset = -dmin * minimum
    SIGNED_BYTES   scale i8                   d f16, 0            scale = d * scale
    EXPONENTS      exponent u8                                    scale = 2 ** (exponent - 127), numbers of MXFP4

Without an offset of its own a group has -scale * zero. Blocks of 32 columns with equal factors (those of AWQ, GPTQ and
compressed-tensors: 64 or 128 columns have one scale) become one group. No value is rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

HALVES, HALF_PAIRS, BYTE_PAIRS, SIGNED_BYTES, EXPONENTS = range(5)
GROUP_BYTES = {HALVES: 2, HALF_PAIRS: 4, BYTE_PAIRS: 2, SIGNED_BYTES: 1, EXPONENTS: 1}
TOP_BYTES = {BYTE_PAIRS: 4, SIGNED_BYTES: 4}  # of the factors of 256 columns
TOP_COLUMNS = 256
LARGEST_GROUP = 128
PANEL_VALUES = 1 << 25  # that exist as single bytes at a time


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How rows of one format are held."""

    low: int  # bits of the first plane
    high: int  # bits of the second plane; 0: there is none
    group: int  # columns with one scale
    scales: int
    zero: int = 0  # the code of value 0

    def regions(self, depth: int) -> tuple[int, int, int, int]:
        """(first byte of the high bits, of the factors of groups, of those of 256 columns, bytes of a row)."""
        sizes = (
            depth * self.low // 8, depth * self.high // 8, depth // self.group * GROUP_BYTES[self.scales],
            depth // TOP_COLUMNS * TOP_BYTES.get(self.scales, 0),
        )  # fmt: skip
        ends = np.cumsum([-(-size // 16) * 16 for size in sizes])
        return int(ends[0]), int(ends[1]), int(ends[2]), int(ends[3])

    def constants(self, depth: int) -> dict[str, int]:
        """Constants of the kernels that read such rows."""
        high_at, scales_at, tops_at, row_bytes = self.regions(depth)
        return {
            "LOW": self.low, "HIGH": self.high, "GROUP": self.group, "SCALES": self.scales, "ZERO": self.zero,
            "HIGH_AT": high_at, "SCALES_AT": scales_at, "TOPS_AT": tops_at, "ROW_BYTES": row_bytes,
        }  # fmt: skip


LAYOUTS = {
    QuantFormat.Q8_0: RowLayout(8, 0, 32, HALVES),
    QuantFormat.Q4_0: RowLayout(4, 0, 32, HALVES, 8),
    QuantFormat.Q4_1: RowLayout(4, 0, 32, HALF_PAIRS),
    QuantFormat.Q2_K: RowLayout(2, 0, 16, BYTE_PAIRS),
    QuantFormat.Q3_K: RowLayout(2, 1, 16, SIGNED_BYTES, 4),
    QuantFormat.Q4_K: RowLayout(4, 0, 32, BYTE_PAIRS),
    QuantFormat.Q5_K: RowLayout(4, 1, 32, BYTE_PAIRS),
    QuantFormat.Q6_K: RowLayout(4, 2, 16, SIGNED_BYTES, 32),
    QuantFormat.MXFP4: RowLayout(4, 0, 32, EXPONENTS),
}


def held_bits(format: QuantFormat) -> float:
    """Bits of a value of a long row."""
    layout = LAYOUTS.get(format)
    return format.bits_per_element if layout is None else layout.regions(1 << 16)[3] * 8 / (1 << 16)


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """A matrix [outputs, depth] on the device."""

    format: QuantFormat
    layout: RowLayout
    rows: torch.Tensor  # u8[outputs, bytes of a row]
    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        return self.rows.numel()

    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows as words, as halves and as bytes: arguments of the kernels in Triton."""
        return self.rows.view(torch.int32), self.rows.view(torch.float16), self.rows

    def constants(self) -> dict[str, int]:
        return self.layout.constants(self.shape[1])


# -- from the blocks of files ------------------------------------------------------------------------------------------
class Blocks(NamedTuple):
    """Some rows of a matrix."""

    codes: torch.Tensor  # u8[rows, depth]
    factors: torch.Tensor  # u8[rows, groups, bytes]
    tops: torch.Tensor | None = None  # u8[rows, depth / 256, 4]


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """Rows of a matrix as the file holds them, on the device."""

    format: QuantFormat
    data: torch.Tensor  # u8[rows, row_bytes]
    shape: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    def held(self) -> CopiedRows:
        return self


def pack(parts: tuple[QuantizedTensor | CopiedRows, ...], device: str) -> QuantisedWeight:
    """Concatenate matrices of one format and width on the device."""
    format, depth = parts[0].format, parts[0].shape[1]
    held = [part.held() for part in parts]
    layout = LAYOUTS[format]
    if layout.group == 32 and layout.scales in (HALVES, HALF_PAIRS):
        layout = replace(layout, group=min(_common_group(part, GROUP_BYTES[layout.scales]) for part in held))
    row_bytes, first = layout.regions(depth)[3], 0
    rows = torch.zeros((sum(part.num_rows for part in held), row_bytes), dtype=torch.uint8, device=device)
    step = max(1, PANEL_VALUES // depth)
    for part in held:
        for start in range(0, part.num_rows, step):
            raw = on_device(part.data[start : start + step], device)
            blocks = _READERS[format](raw.view(len(raw), -1, format.block_bytes))
            _write(blocks, layout, rows[first + start : first + start + len(raw)])
        first += part.num_rows
    return QuantisedWeight(format, layout, rows, (len(rows), depth))


def on_device(data: np.ndarray | torch.Tensor, device: str) -> torch.Tensor:
    """Rows of a file; those of experts that a stream copied are there already."""
    return data if isinstance(data, torch.Tensor) else torch.from_numpy(np.array(data)).to(device)


def _common_group(part: QuantizedTensor | CopiedRows, factor_bytes: int) -> int:
    """Columns with equal factors: 32, or 64 or 128 where that holds for all of the matrix on the host."""
    if isinstance(part, CopiedRows):
        return 32
    blocks = part.data.reshape(part.num_rows, -1, part.format.block_bytes)[:, :, :factor_bytes]
    group = 32
    while group < LARGEST_GROUP and blocks.shape[1] % 2 == 0:
        pairs = blocks.reshape(len(blocks), -1, 2, factor_bytes)
        if not np.array_equal(pairs[:, :, 0], pairs[:, :, 1]):
            break
        blocks, group = pairs[:, :, 0], 2 * group
    return group


def _write(blocks: Blocks, layout: RowLayout, rows: torch.Tensor) -> None:
    count, depth = blocks.codes.shape
    high_at, scales_at, tops_at, _ = layout.regions(depth)
    low = blocks.codes if layout.low == 8 else blocks.codes & ((1 << layout.low) - 1)
    rows[:, : depth * layout.low // 8] = _plane(low, layout.low)
    if layout.high:
        rows[:, high_at : high_at + depth * layout.high // 8] = _plane(blocks.codes >> layout.low, layout.high)
    factors = blocks.factors[:, :: max(1, layout.group * blocks.factors.shape[1] // depth)].reshape(count, -1)
    rows[:, scales_at : scales_at + factors.shape[1]] = factors
    if blocks.tops is not None:
        tops = blocks.tops.reshape(count, -1)
        rows[:, tops_at : tops_at + tops.shape[1]] = tops


def _plane(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """u8[rows, depth * bits / 8]"""
    if bits == 8:
        return codes
    each = codes.view(len(codes), -1, 8 // bits, 4)
    plane = each[:, :, 0].clone()
    for place in range(1, 8 // bits):
        plane |= each[:, :, place] << (bits * place)
    return plane.reshape(len(codes), -1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low nibbles, then high ones, of the last dimension."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _flat(codes: torch.Tensor) -> torch.Tensor:
    return codes.reshape(len(codes), -1)


def _read_q8_0(blocks: torch.Tensor) -> Blocks:
    return Blocks(_flat(blocks[:, :, 2:]), blocks[:, :, :2])


def _read_nibbles(header: int) -> Callable[[torch.Tensor], Blocks]:
    return lambda blocks: Blocks(_flat(_nibbles(blocks[:, :, header:])), blocks[:, :, :header])


def _six_bit_pairs(packed: torch.Tensor) -> torch.Tensor:
    """u8[rows, groups, 2]: scale and minimum of 8 groups of every 12 bytes."""
    first, second, third = packed[:, :, 0:4], packed[:, :, 4:8], packed[:, :, 8:12]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 6) << 4)], dim=2)
    minima = torch.cat([second & 63, (third >> 4) | ((second >> 6) << 4)], dim=2)
    return torch.stack([scales, minima], dim=3).flatten(1, 2)


def _quarters(packed: torch.Tensor) -> torch.Tensor:
    """Codes of two bits: 128 columns of every 32 bytes, the lowest bits first."""
    each = packed.view(*packed.shape[:2], -1, 1, 32)
    return torch.cat([(each >> shift) & 3 for shift in (0, 2, 4, 6)], dim=3).flatten(2)


def _read_q4_k(blocks: torch.Tensor) -> Blocks:
    """|d f16|dmin f16|12 bytes of scales and minima|128 bytes: 64 columns of every 32|"""
    codes = _nibbles(blocks[:, :, 16:].reshape(*blocks.shape[:2], 4, 32))
    return Blocks(_flat(codes), _six_bit_pairs(blocks[:, :, 4:16]), blocks[:, :, :4])


def _read_q5_k(blocks: torch.Tensor) -> Blocks:
    """As Q4_K, with 32 bytes of fifth bits before the codes: bit j of byte l belongs to column 32 j + l."""
    codes = _nibbles(blocks[:, :, 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], 8, 32)
    fifth = torch.stack([(blocks[:, :, 16:48] >> bit) & 1 for bit in range(8)], dim=2)
    return Blocks(_flat(codes | fifth << 4), _six_bit_pairs(blocks[:, :, 4:16]), blocks[:, :, :4])


def _top(half: torch.Tensor) -> torch.Tensor:
    """d f16 and a half of zeros."""
    return torch.cat([half, torch.zeros_like(half)], dim=2)


def _read_q6_k(blocks: torch.Tensor) -> Blocks:
    """|128 bytes of nibbles|64 of upper bits|16 scales i8|d f16|, 128 columns of every 64 and 32 bytes"""
    nibbles = _nibbles(blocks[:, :, :128].reshape(*blocks.shape[:2], 2, 64)).flatten(2)
    codes = nibbles | _quarters(blocks[:, :, 128:192].contiguous()) << 4
    return Blocks(_flat(codes), blocks[:, :, 192:208].reshape(len(blocks), -1, 1), _top(blocks[:, :, 208:]))


def _read_q3_k(blocks: torch.Tensor) -> Blocks:
    """|32 bytes of third bits, as in Q5_K|64 of lower bits|12 of scales of 6 bits|d f16|"""
    third = torch.stack([(blocks[:, :, :32] >> bit) & 1 for bit in range(8)], dim=2).flatten(2)
    codes = _quarters(blocks[:, :, 32:96].contiguous()) | third << 2
    packed = blocks[:, :, 96:108]
    upper = torch.cat([(packed[:, :, 8:] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)
    scales = (_nibbles(packed[:, :, :8]) | upper << 4).view(torch.int8) - 32
    return Blocks(_flat(codes), scales.view(torch.uint8).reshape(len(blocks), -1, 1), _top(blocks[:, :, 108:]))


def _read_q2_k(blocks: torch.Tensor) -> Blocks:
    """|16 bytes: scale in the low nibble, minimum in the high one|64 of codes|d f16|dmin f16|"""
    packed = blocks[:, :, :16]
    pairs = torch.stack([packed & 15, packed >> 4], dim=3).flatten(1, 2)
    return Blocks(_flat(_quarters(blocks[:, :, 16:80].contiguous())), pairs, blocks[:, :, 80:])


_READERS: dict[QuantFormat, Callable[[Any], Blocks]] = {
    QuantFormat.Q8_0: _read_q8_0,
    QuantFormat.Q4_0: _read_nibbles(2),
    QuantFormat.Q4_1: _read_nibbles(4),
    QuantFormat.MXFP4: _read_nibbles(1),
    QuantFormat.Q2_K: _read_q2_k,
    QuantFormat.Q3_K: _read_q3_k,
    QuantFormat.Q4_K: _read_q4_k,
    QuantFormat.Q5_K: _read_q5_k,
    QuantFormat.Q6_K: _read_q6_k,
}
