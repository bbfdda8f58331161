# mypy: disallow-untyped-decorators=False
"""Experts in MXFP4, in words of 8 codes: a block of 32 elements is 4 words, 16 bytes that one thread loads.

    element     0 1 2 3   4 5 6 7   ...   28 29 30 31
    word        0 1 2 3   0 1 2 3   ...    0  1  2  3      code k of word j is element 4 k + j
    values      i32[outputs, depth / 32, 4]
    scales      u8[outputs, depth / 32]    exponents of 2 plus 127, at most `LARGEST_EXPONENT`

A code has a sign, two bits of exponent and one of mantissa. At the places of the sign, the lowest exponent bits and the
highest mantissa bit of an f32 or a bf16 they are the number over 2 ** 126, subnormal ones included:

    code k of a word         |....s e e m ....|        code 0 in the lowest bits
    shifted to the top       |s e e m 0 ...   |
    shifted back by 6        |s s s s s s s e e m ..|  with copies of the sign, which the mask removes

For tensor cores two words become 8 pairs of bf16: code k of both words is one pair, two neighbouring elements of the
block, and shifts, masks and the product with the scale work on both at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.quant.tensor import QuantizedTensor

LARGEST_EXPONENT = 128  # of a scale: 2 ** (128 - 127 + 126) is the largest power of 2 in f32
LIFT = tl.constexpr(2.0**100)  # of x before products with numbers over 2 ** 126, and
LIFTED = tl.constexpr(26)  # the exponent of 2 by which the scales are larger then


@dataclass(frozen=True, slots=True)
class WordsWeight:
    """A matrix [outputs, depth] on the device."""

    values: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, int]


def pack_words(parts: tuple[QuantizedTensor, ...], device: str) -> WordsWeight | None:
    """Concatenate matrices in MXFP4; None where a scale is too large."""
    depth = parts[0].shape[1]
    values, scales = [], []
    for part in parts:
        blocks = torch.from_numpy(np.array(part.data)).to(device).view(part.shape[0], depth // 32, 17)
        codes = torch.cat([blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4], dim=2).view(part.shape[0], -1, 8, 4)
        in_bytes = (codes[:, :, 0::2] | codes[:, :, 1::2] << 4).transpose(2, 3)  # u8[rows, blocks, words, bytes]
        values.append(in_bytes.reshape(part.shape[0], -1))
        scales.append(blocks[:, :, 0])
    exponents = torch.cat(scales).contiguous()
    if int(exponents.max()) > LARGEST_EXPONENT:
        return None
    words = torch.cat(values).view(torch.int32)
    return WordsWeight(words, exponents, (len(words), depth))


@triton.jit
def number(words: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """f32: code K of each word, over 2 ** 126."""
    return (((words << (28 - 4 * K)) >> 6) & -2118123520).to(tl.float32, bitcast=True)  # 0x81C00000


@triton.jit
def load_words(values: tl.tensor, place: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """i32[..., 4]: the words of the blocks numbered `place` i64[..., 1]."""
    word = tl.arange(0, 4)
    for _ in tl.static_range(len(place.shape) - 1):
        word = tl.expand_dims(word, 0)
    return tl.load(values + place * 4 + word, mask=inside, other=0)


@triton.jit
def load_powers(scales: tl.tensor, place: tl.tensor, inside: tl.tensor, SHIFT: tl.constexpr) -> tl.tensor:
    """f32[...]: the scales of these blocks times 2 ** SHIFT."""
    exponent = tl.load(scales + place, mask=inside, other=0).to(tl.int32)
    return ((exponent + SHIFT) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _pairs(words: tl.tensor, scales: tl.tensor) -> tl.tensor:
    """8 times bf16[...]: code k of each word times the scale, whose bf16 is in both halves of its integer."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 low, high, a, b;
            prmt.b32 low, $8, $9, 0x5410;
            prmt.b32 high, $8, $9, 0x7632;
            shl.b32 a, low, 12;  and.b32 a, a, 0x80008000;  shl.b32 b, low, 6;
            lop3.b32 a, b, 0x01C001C0, a, 0xEA;  mul.bf16x2 $0, a, $10;
            shl.b32 a, low, 8;   and.b32 a, a, 0x80008000;  shl.b32 b, low, 2;
            lop3.b32 a, b, 0x01C001C0, a, 0xEA;  mul.bf16x2 $1, a, $10;
            shl.b32 a, low, 4;   and.b32 a, a, 0x80008000;  shr.u32 b, low, 2;
            lop3.b32 a, b, 0x01C001C0, a, 0xEA;  mul.bf16x2 $2, a, $10;
            and.b32 a, low, 0x80008000;                     shr.u32 b, low, 6;
            lop3.b32 a, b, 0x01C001C0, a, 0xEA;  mul.bf16x2 $3, a, $10;
            shl.b32 a, high, 12; and.b32 a, a, 0x80008000;  shl.b32 b, high, 6;
            lop3.b32 a, b, 0x01C001C0, a, 0xEA;  mul.bf16x2 $4, a, $10;
            shl.b32 a, high, 8;  and.b32 a, a, 0x80008000;  shl.b32 b, high, 2;
            lop3.b32 a, b, 0x01C001C0, a, 0xEA;  mul.bf16x2 $5, a, $10;
            shl.b32 a, high, 4;  and.b32 a, a, 0x80008000;  shr.u32 b, high, 2;
            lop3.b32 a, b, 0x01C001C0, a, 0xEA;  mul.bf16x2 $6, a, $10;
            and.b32 a, high, 0x80008000;                    shr.u32 b, high, 6;
            lop3.b32 a, b, 0x01C001C0, a, 0xEA;  mul.bf16x2 $7, a, $10;
        }
        """,
        constraints="=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        args=[words, scales],
        dtype=(tl.bfloat16,) * 8,
        is_pure=True,
        pack=2,
    )


@triton.jit
def dense_tile(
    values: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,  # i64[rows]
    exists: tl.tensor,  # bool[rows]
    start: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    IN_PAIRS: tl.constexpr,  # by instructions of the GPU, in bf16
    TURNED: tl.constexpr,
) -> tl.tensor:
    """[rows, BLOCK], or [BLOCK, rows] if TURNED: dequantised columns, bf16 if IN_PAIRS, else f32."""
    block = start // 32 + tl.arange(0, BLOCK // 32)
    inside = exists[:, None] & (block < DEPTH // 32)[None, :]
    place = row[:, None] * (DEPTH // 32) + block[None, :]
    words = load_words(values, place[:, :, None], inside[:, :, None])
    if IN_PAIRS:
        exponent = tl.load(scales + place, mask=inside, other=0).to(tl.int32)
        power = (exponent + 126) * 8388736  # << 7 and << 23: the same bf16 in both halves
        c0, c1, c2, c3, c4, c5, c6, c7 = _pairs(words, tl.broadcast_to(power[:, :, None], words.shape))
    else:
        power = load_powers(scales, place, inside, 126)[:, :, None]
        c0, c1, c2, c3 = number(words, 0), number(words, 1), number(words, 2), number(words, 3)
        c4, c5, c6, c7 = number(words, 4), number(words, 5), number(words, 6), number(words, 7)
        c0, c1, c2, c3 = c0 * power, c1 * power, c2 * power, c3 * power
        c4, c5, c6, c7 = c4 * power, c5 * power, c6 * power, c7 * power
    even = tl.join(tl.join(c0, c4), tl.join(c2, c6))
    odd = tl.join(tl.join(c1, c5), tl.join(c3, c7))
    joined = tl.reshape(tl.join(even, odd), [row.shape[0], BLOCK // 32, 4, 8])
    if TURNED:
        tile = tl.reshape(tl.permute(joined, (1, 3, 2, 0)), [BLOCK, row.shape[0]])
    else:
        tile = tl.reshape(tl.permute(joined, (0, 1, 3, 2)), [row.shape[0], BLOCK])
    return tile


@triton.jit
def _dequantise_kernel(
    values: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,  # [rows, depth]
    num_rows: tl.tensor,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    wait_for_inputs()
    numbers = dense_tile(values, scales, row, row < num_rows, start, DEPTH, BLOCK, False, False)
    column = start + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < DEPTH)[None, :]
    tl.store(out + row[:, None] * DEPTH + column[None, :], numbers.to(out.dtype.element_ty), mask=mask)


def dequantise_words(weight: WordsWeight, dtype: torch.dtype) -> torch.Tensor:
    """[outputs, depth]"""
    outputs, depth = weight.shape
    out = torch.empty((outputs, depth), dtype=dtype, device=weight.values.device)
    rows, block = 8, min(1024, triton.next_power_of_2(depth))
    _dequantise_kernel[(triton.cdiv(outputs, rows), triton.cdiv(depth, block))](
        weight.values, weight.scales, out, outputs, DEPTH=depth, ROWS=rows, BLOCK=block, num_warps=4, **OVERLAPPED
    )
    return out
