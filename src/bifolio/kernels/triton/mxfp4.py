# mypy: disallow-untyped-decorators=False
"""Experts in MXFP4, in words of 8 codes: a code becomes an f32 by two shifts and a mask.

A code has a sign, two bits of exponent and one of mantissa. At the places of an f32's sign, lowest exponent bits and
highest mantissa bit they are the number over 2 ** 126, subnormal ones included:

    code k of a word         |....s e e m ....|        code 0 in the lowest bits, elements in their order
    shifted to the top       |s e e m 0 ...   |
    shifted back by 6        |s s s s s s s e e m ..|  with copies of the sign, which the mask removes

    values   i32[outputs, depth / 8]
    scales   u8[outputs, depth / 32]    exponents of 2 plus 127, at most `LARGEST_EXPONENT`
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.triton.quantised import QuantisedWeight
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

LARGEST_EXPONENT = 128  # of a scale: 2 ** (128 - 127 + 126) is the largest power of 2 in f32
LIFT = tl.constexpr(2.0**100)  # of x before products with numbers over 2 ** 126, and
LIFTED = tl.constexpr(26)  # the exponent of 2 by which the scales are larger then


def pack_words(parts: tuple[QuantizedTensor, ...], device: str) -> QuantisedWeight | None:
    """Concatenate matrices in MXFP4; None where a scale is too large."""
    depth = parts[0].shape[1]
    values, scales = [], []
    for part in parts:
        blocks = torch.from_numpy(np.array(part.data)).to(device).view(part.shape[0], depth // 32, 17)
        codes = torch.cat([blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4], dim=2)
        values.append((codes[:, :, 0::2] | codes[:, :, 1::2] << 4).contiguous().view(part.shape[0], -1))
        scales.append(blocks[:, :, 0])
    exponents = torch.cat(scales).contiguous()
    if int(exponents.max()) > LARGEST_EXPONENT:
        return None
    words = torch.cat(values).view(torch.int32)
    return QuantisedWeight(QuantFormat.MXFP4, words, exponents, None, (len(words), depth))


@triton.jit
def _number(words: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """f32: code K of each word, over 2 ** 126."""
    return (((words << (28 - 4 * K)) >> 6) & -2118123520).to(tl.float32, bitcast=True)  # 0x81C00000


@triton.jit
def unpack_words(words: tl.tensor) -> tl.tensor:
    """f32[rows, 8 * words], over 2 ** 126, of i32[rows, words]."""
    first = tl.join(tl.join(_number(words, 0), _number(words, 4)), tl.join(_number(words, 2), _number(words, 6)))
    second = tl.join(tl.join(_number(words, 1), _number(words, 5)), tl.join(_number(words, 3), _number(words, 7)))
    return tl.reshape(tl.join(first, second), [words.shape[0], words.shape[1] * 8])


@triton.jit
def load_words(
    values: tl.tensor, row: tl.tensor, exists: tl.tensor, start: tl.tensor, DEPTH: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """i32[rows, BLOCK / 8]: the words of columns [start, start + BLOCK) of the rows i64[rows]."""
    word = start // 8 + tl.arange(0, BLOCK // 8)
    mask = exists[:, None] & (word < DEPTH // 8)[None, :]
    return tl.load(values + row[:, None] * (DEPTH // 8) + word[None, :], mask=mask, other=0)


@triton.jit
def load_powers(
    scales: tl.tensor,
    row: tl.tensor,
    exists: tl.tensor,
    start: tl.tensor,
    SHIFT: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """f32[rows, BLOCK / 32]: the scales times 2 ** SHIFT."""
    block = start // 32 + tl.arange(0, BLOCK // 32)
    mask = exists[:, None] & (block < DEPTH // 32)[None, :]
    exponent = tl.load(scales + row[:, None] * (DEPTH // 32) + block[None, :], mask=mask, other=0).to(tl.int32)
    return ((exponent + SHIFT) << 23).to(tl.float32, bitcast=True)


@triton.jit
def dense_tile(
    values: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    exists: tl.tensor,
    start: tl.tensor,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """f32[rows, BLOCK]: dequantised columns."""
    ROWS: tl.constexpr = row.shape[0]
    numbers = unpack_words(load_words(values, row, exists, start, DEPTH, BLOCK))
    powers = load_powers(scales, row, exists, start, 126, DEPTH, BLOCK)
    scaled = tl.reshape(numbers, [ROWS, BLOCK // 32, 32]) * powers[:, :, None]
    return tl.reshape(scaled, [ROWS, BLOCK])


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
    numbers = dense_tile(values, scales, row, row < num_rows, start, DEPTH, BLOCK)
    column = start + tl.arange(0, BLOCK)
    mask = (row < num_rows)[:, None] & (column < DEPTH)[None, :]
    tl.store(out + row[:, None] * DEPTH + column[None, :], numbers.to(out.dtype.element_ty), mask=mask)


def dequantise_words(weight: QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    """[outputs, depth]"""
    outputs, depth = weight.shape
    out = torch.empty((outputs, depth), dtype=dtype, device=weight.values.device)
    rows, block = 8, min(1024, triton.next_power_of_2(depth))
    _dequantise_kernel[(triton.cdiv(outputs, rows), triton.cdiv(depth, block))](
        weight.values, weight.scales, out, outputs, DEPTH=depth, ROWS=rows, BLOCK=block, num_warps=4, **OVERLAPPED
    )
    return out
