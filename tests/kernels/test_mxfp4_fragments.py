"""Experts in MXFP4 keep every code and every scale when they are packed in the order of tensor-core fragments."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from bifolio.kernels.cuda.mxfp4_fragments import CHUNK_BYTES, CODE_BYTES, FragmentStack, pack_fragments
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
LARGEST_EXPONENT = 128


def random_blocks(rows: int, columns: int, seed: int, largest: int = LARGEST_EXPONENT) -> np.ndarray:
    """u8[rows, blocks, 17]: an exponent, then element j in the low half of byte j, element j + 16 in the high one."""
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns // 32, 17), np.uint8)
    blocks[:, :, 0] = np.random.default_rng(seed + 1).integers(90, largest + 1, blocks.shape[:2])
    blocks[0, 0, 0] = largest
    return blocks


def tensor_of(blocks: np.ndarray) -> QuantizedTensor:
    return QuantizedTensor(
        QuantFormat.MXFP4, blocks.reshape(len(blocks), -1).copy(), (len(blocks), blocks.shape[1] * 32)
    )


def decoded(blocks: np.ndarray) -> np.ndarray:
    """f64[rows, columns], by the definition of the format."""
    codes = np.concatenate([blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4], axis=2)
    return (NUMBERS[codes] * 2.0 ** (blocks[:, :, :1].astype(int) - 127)).reshape(len(blocks), -1)


def bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def unpacked(stack: FragmentStack) -> np.ndarray:
    """f64[experts, tiles, 16, columns], by the shifts and masks of the kernel."""
    data = stack.data.transpose(2, 3).flatten(1, 2).cpu().numpy()
    words = np.ascontiguousarray(data[..., :CODE_BYTES]).view(np.uint32).reshape(*data.shape[:3], 8, 4, 4)
    scales = data[..., CODE_BYTES:].reshape(*data.shape[:3], 8, 1, 2, 2)  # line, half, row / 8
    number = np.uint32(0x81C081C0)
    turned = words >> np.uint32(4) | words << np.uint32(28)
    split = (words << np.uint32(2) & np.uint32(0x80C080C0)) | (words >> np.uint32(6) & np.uint32(0x01000100))
    pairs = (words & number, words << np.uint32(6) & number, turned & number, split)
    out = np.zeros((*data.shape[:2], 16, data.shape[2] * 64))
    for word in range(4):
        for pair in range(4):
            for element in (0, 1):
                values = bf16(pairs[pair][..., word] >> np.uint32(16 * element) & np.uint32(0xFFFF))
                values = values * bf16(scales[..., word // 2, pair % 2].astype(np.uint32) << 7)
                for t in range(4):
                    column = 16 * word + 8 * (pair // 2) + 2 * t + element
                    rows = slice(pair % 2 * 8, pair % 2 * 8 + 8)
                    out[:, :, rows, column::64] = values[..., t].transpose(0, 1, 3, 2)
    return out


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (80, 96), (33, 32), (7, 160)])
def test_codes_and_scales_are_exact(rows: int, columns: int) -> None:
    """Sizes that fill no tile or no chunk are padded with zeros."""
    blocks = [random_blocks(rows, columns, seed) for seed in (1, 2, 3)]
    stack = pack_fragments([(tensor_of(each),) for each in blocks], None, "cpu", gated=False)
    assert stack is not None
    assert (stack.rows, stack.depth, stack.num_experts, stack.data.shape[-1]) == (rows, columns, 3, CHUNK_BYTES)
    found = unpacked(stack).reshape(3, -1, stack.chunks * 64)
    for each, own in zip(blocks, found, strict=True):
        np.testing.assert_array_equal(own[:rows, :columns], decoded(each))
    assert not found[:, rows:].any()
    assert not found[:, :, columns:].any()


@pytest.mark.parametrize("one_matrix", [False, True])
@pytest.mark.parametrize("outputs", [8, 20, 64])
def test_gates_and_up_share_tiles(outputs: int, one_matrix: bool) -> None:
    gate, up = random_blocks(outputs, 96, 1), random_blocks(outputs, 96, 2)
    parts = (tensor_of(np.concatenate([gate, up])),) if one_matrix else (tensor_of(gate), tensor_of(up))
    stack = pack_fragments([parts], None, "cpu", gated=True)
    assert stack is not None
    assert stack.rows == 2 * outputs
    found = unpacked(stack)[0]
    np.testing.assert_array_equal(found[:, :8].reshape(-1, 128)[:outputs, :96], decoded(gate))
    np.testing.assert_array_equal(found[:, 8:].reshape(-1, 128)[:outputs, :96], decoded(up))


def test_scales_that_leave_the_range_of_the_fragments_are_refused() -> None:
    assert pack_fragments([(tensor_of(random_blocks(16, 64, 1, 129)),)], None, "cpu", gated=False) is None


def test_every_code_survives() -> None:
    """All pairs of codes, at every place of a word."""
    codes = np.arange(256, dtype=np.uint8)
    blocks = np.full((16, 16, 17), 127, np.uint8)
    for row in range(16):
        blocks[row, :, 1:] = np.roll(codes, row * 37).reshape(16, 16)
    stack = pack_fragments([(tensor_of(blocks),)], None, "cpu", gated=False)
    assert stack is not None
    assert torch.count_nonzero(stack.data) > 0
    np.testing.assert_array_equal(unpacked(stack)[0, 0], decoded(blocks))
