"""The model that the cache's state machine compares with: tokens of sequences, and the keys a network computes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 1


@dataclass
class Modelled:
    tokens: list[int]
    salt: bytes
    written: int = 0  # tokens whose keys and values are in the cache; always fewer than tokens
    publishes: bool = True


def contents(salt: bytes, tokens: list[int]) -> np.ndarray:
    """What the network would compute: [NUM_LAYERS, len(tokens), NUM_HEADS, HEAD_DIM], exact in f32."""
    state, codes = zlib.crc32(salt), []
    for token in tokens:
        state = zlib.crc32(bytes([token]), state)
        codes.append(state >> 12)
    places = np.arange(NUM_LAYERS * NUM_HEADS * HEAD_DIM).reshape(NUM_LAYERS, 1, NUM_HEADS, HEAD_DIM) / 8
    return (np.array(codes, dtype=np.float64).reshape(1, -1, 1, 1) + places).astype(np.float32)
