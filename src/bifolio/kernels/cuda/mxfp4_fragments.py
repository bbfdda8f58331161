"""Experts in MXFP4 in the order of tensor-core fragments, so that each thread loads its own codes in 16 bytes.

    tile   16 rows of an expert's matrix; of gate and up rows 0..7 are those of gates, 8..15 those of up
    chunk  a tile times 64 columns, 544 bytes: 4 words of 8 codes for each of 32 lanes, 4 scales for each of 8 lines
    data   u8[experts, tiles / 4, chunks, 4, 544]

Lane 4 g + t owns rows g and g + 8 (pairs 0, 2 and 1, 3 of a word) and in word j columns 16 j + 2 t + 0, 1, 8, 9.
A code has a sign, two bits of exponent and one of mantissa; a pair of codes lies in both halves of a word at the places
below, from which one shift and one mask make a pair of bf16 (`mxfp4_common.cu`). Rows and columns behind the last ones
are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bifolio.quant.tensor import QuantizedTensor

CHUNK_BYTES, CODE_BYTES, CHUNK_COLUMNS, TILE_ROWS, GROUP_TILES = 544, 512, 64, 16, 4
SCALE_OFFSET = 126  # codes become numbers over 2 ** 126
LARGEST_EXPONENT = 128  # of a block, plus 127: the stored byte is at most 254
OTHER_HALF = 16  # added to the places of bits that lie in the other half of the word
PLACES = ((15, 8, 7, 6), (9, 2, 1, 0), (3 + OTHER_HALF, 12, 11, 10), (13, 14, 5, 4))  # bits s e e m of each pair


@dataclass(frozen=True, slots=True)
class FragmentStack:
    """One projection of all experts."""

    data: torch.Tensor  # u8[experts, tiles / 4, chunks, 4, 544]
    bias: torch.Tensor | None  # f32[experts, rows]
    rows: int  # of one expert; of gate and up both
    depth: int

    @property
    def num_experts(self) -> int:
        return len(self.data)

    @property
    def tiles(self) -> int:
        return int(self.data.shape[1]) * GROUP_TILES

    @property
    def chunks(self) -> int:
        return int(self.data.shape[2])


def pack_fragments(
    experts: Sequence[Sequence[QuantizedTensor]], bias: torch.Tensor | None, device: str, *, gated: bool
) -> FragmentStack | None:
    """Pack the matrices of each expert, whose rows follow one another; None where a scale is too large."""
    rows, depth = sum(part.shape[0] for part in experts[0]), experts[0][0].shape[1]
    groups, chunks = -(-rows // (TILE_ROWS * GROUP_TILES)), -(-depth // CHUNK_COLUMNS)
    data = torch.empty((len(experts), groups, chunks, GROUP_TILES, CHUNK_BYTES), dtype=torch.uint8, device=device)
    for own, parts in zip(data, experts, strict=True):
        blocks = torch.cat([_blocks(part, device) for part in parts])
        if int(blocks[:, :, 0].max()) > LARGEST_EXPONENT:
            return None
        own.copy_(_chunks(blocks, gated))
    return FragmentStack(data, bias, rows, depth)


def _blocks(part: QuantizedTensor, device: str) -> torch.Tensor:
    """u8[rows, blocks, 17]"""
    return torch.from_numpy(np.array(part.data)).to(device).view(part.shape[0], -1, 17)


def _chunks(blocks: torch.Tensor, gated: bool) -> torch.Tensor:
    """u8[tiles / 4, chunks, 4, 544] of u8[rows, blocks of 32, 17]"""
    codes = torch.cat([blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4], dim=2)
    codes = _in_tiles(codes.flatten(1), gated, CHUNK_COLUMNS)
    scales = _in_tiles(blocks[:, :, 0] + SCALE_OFFSET, gated, CHUNK_COLUMNS // 32)
    tiles, chunks = codes.shape[0], codes.shape[2] // CHUNK_COLUMNS
    # [tile, row / 8, g, chunk, word, pair / 2, t, element] -> [tile, chunk, g, t, word, pair / 2, row / 8, element]
    pairs = codes.view(tiles, 2, 8, chunks, 4, 2, 4, 2).permute(0, 3, 2, 6, 4, 5, 1, 7).flatten(5, 6)
    words = torch.zeros(pairs.shape[:5], dtype=torch.int32, device=codes.device)
    for pair, places in enumerate(PLACES):
        for element in (0, 1):
            words |= _spread(places, element, codes.device)[pairs[..., pair, element].int()]
    out = torch.empty((tiles, chunks, CHUNK_BYTES), dtype=torch.uint8, device=codes.device)
    out[:, :, :CODE_BYTES] = words.contiguous().view(torch.uint8).view(tiles, chunks, -1)
    # [tile, row / 8, g, chunk, h] -> [tile, chunk, g, h, row / 8]
    out[:, :, CODE_BYTES:] = scales.view(tiles, 2, 8, chunks, 2).permute(0, 3, 2, 4, 1).reshape(tiles, chunks, -1)
    return out.view(-1, GROUP_TILES, chunks, CHUNK_BYTES).transpose(1, 2)


def _in_tiles(values: torch.Tensor, gated: bool, multiple: int) -> torch.Tensor:
    """[tiles, 16, columns] of [rows, columns]: zeros behind the last ones, gates and up in turns of 8 rows."""
    halves = values.view(2, -1, values.shape[1]) if gated else values[None]
    step = 8 if gated else TILE_ROWS
    padded = torch.nn.functional.pad(
        halves, (0, -values.shape[1] % multiple, 0, -halves.shape[1] % (step * GROUP_TILES))
    )
    return padded.view(len(halves), -1, step, padded.shape[2]).transpose(0, 1).reshape(-1, TILE_ROWS, padded.shape[2])


def _spread(places: tuple[int, ...], element: int, device: torch.device) -> torch.Tensor:
    """i32[16]: the bits of each code at their places in the word."""
    found = np.zeros(16, np.uint32)
    for code in range(16):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            found[code] |= np.uint32((code >> bit & 1) << (place + 16 * element) % 32)
    return torch.from_numpy(found.view(np.int32)).to(device)
