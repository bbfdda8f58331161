"""Choosing positions by an indexer, and attention to them, on numpy arrays.

Positions are chosen query by query: the choice of a query depends on its position and its sequence alone, whatever
else a pass computes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bifolio.kernels.interface import Array, AttentionShape, Heads, PagedAttentionKernel, Segments, Storage
from bifolio.kernels.query_split import split_queries

MOST_VALUES = 1 << 24  # of the keys that are gathered at once


class HostChoice(PagedAttentionKernel):
    """`choose` and `attend_chosen` of a kernel set on numpy arrays."""

    def choose(
        self, heads: Heads, weights: Array, shape: AttentionShape, segments: Segments, storage: Storage | None
    ) -> NDArray[np.int32]:
        found = np.full((len(heads.query), shape.top_k), -1, np.int32)
        for part in split_queries(segments, shape.top_k).choosing:
            keys = part.keys(heads, shape.layer, storage, np.arange(part.seen + part.stop - part.start - 1))
            for row, seen in part.rows():
                scores = np.maximum(heads.query[row] @ keys[:seen].T * np.float32(shape.scale), 0)  # [heads, seen]
                found[row] = largest(weights[row] @ scores, shape.top_k)
        return found

    def attend_chosen(
        self, heads: Heads, chosen: Array, shape: AttentionShape, segments: Segments, storage: Storage | None
    ) -> Array:
        split = split_queries(segments, shape.top_k)
        if not split.choosing:
            return self.attend(heads, shape, segments, storage)
        mixed = np.empty((len(heads.query), shape.num_heads * shape.head_dim), np.float32)
        if split.segments:
            mixed[split.rows] = self.attend(split.others(heads, storage), shape, split.segments, storage)
        size = max(MOST_VALUES // (shape.top_k * shape.head_dim), 1)
        for part in split.choosing:
            for start in range(part.start, part.stop, size):
                rows = slice(start, min(start + size, part.stop))
                keys = part.keys(heads, shape.layer, storage, chosen[rows])
                mixed[rows] = each_by_itself(heads.query[rows], keys, shape)
        return mixed


def largest(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The places of the largest scores, ascending; of equal ones the first. NaN is the least."""
    scores = np.where(np.isnan(scores), np.float32(-np.inf), scores)
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    above, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))


def each_by_itself(query: Array, keys: Array, shape: AttentionShape) -> Array:
    """Attention of each query [n, heads, dim] to keys [n, top_k, dim] of its own, which are the values."""
    found = np.empty((len(query), shape.num_heads * shape.head_dim), np.float32)
    for row, (own, seen) in enumerate(zip(query, keys, strict=True)):
        scores = (own * np.float32(shape.scale)) @ seen.T
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found[row] = ((shares / shares.sum(axis=-1, keepdims=True)) @ seen).reshape(-1)
    return found
