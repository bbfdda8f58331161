"""Biases of attention by distance: a table f32[heads, 2 * reach + 1] for each column's position of the key minus that
of the query, from -reach to reach. Every distance beyond has the bias of the reach.

    alibi    -slope of the head * |distance|, for all distances of the context
    buckets  learned: one for each small distance, one for each of ever longer ranges, and one for all beyond
"""

from __future__ import annotations

import math

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.rope_frequencies import alibi_slopes

FARTHEST = 128  # distances from here on share the last bucket


def alibi(num_heads: int, reach: int) -> np.ndarray:
    """The biases of ALiBi in both directions."""
    distances = np.abs(np.arange(-reach, reach + 1, dtype=np.float32))
    return (-alibi_slopes(num_heads, 8.0)[:, None] * distances).astype(np.float32)


def bucketed(table: np.ndarray) -> np.ndarray:
    """The biases of a learned table f32[buckets, heads]."""
    distances = np.arange(-FARTHEST, FARTHEST + 1)
    return np.ascontiguousarray(table[_buckets(distances, len(table))].T, np.float32)


def _buckets(distances: np.ndarray, count: int) -> np.ndarray:
    """The bucket of each distance: half of all for keys after the query, of these half for single distances."""
    half = count // 2
    exact = half // 2
    apart = np.abs(distances)
    ranges = np.log(np.maximum(apart, 1).astype(np.float32) / np.float32(exact)) / np.float32(
        math.log(FARTHEST / exact)
    )
    wide = np.minimum(exact + (ranges * np.float32(half - exact)).astype(np.int64), half - 1)
    return np.asarray(np.where(distances > 0, half, 0) + np.where(apart < exact, apart, wide))


def distance_bias(config: ModelConfig, table: np.ndarray | None) -> np.ndarray | None:
    """The biases of a network's attention; `table`: the learned ones. None: it has none."""
    if config.distance_bias == "alibi":
        return alibi(config.num_heads, config.max_position - 1)
    return None if table is None else bucketed(table)
