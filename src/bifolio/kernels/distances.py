"""Distances between queries and keys: the mask of bidirectional attention, and columns of biases by distance."""

from __future__ import annotations

import numpy as np


def both_ways_mask(num_queries: int, length: int, window: int | None) -> np.ndarray:
    """bool[num_queries, length]: True where a query of a bidirectional network attends to a key."""
    distance = np.arange(length - num_queries, length)[:, None] - np.arange(length)[None, :]
    return np.asarray(np.abs(distance) < (length if window is None else window))


def bias_columns(num_queries: int, length: int, columns: int) -> np.ndarray:
    """i64[num_queries, length]: the column of the distance of each key from each query."""
    distance = np.arange(length)[None, :] - np.arange(length - num_queries, length)[:, None]
    return np.asarray(np.clip(distance + columns // 2, 0, columns - 1))
