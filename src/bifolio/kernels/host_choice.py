"""Choosing positions by an indexer, and attention to them, on numpy arrays: query by query.

The result of a query depends on its position and its sequence alone, whatever else a pass computes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bifolio.kernels.interface import Array, AttentionSegment, AttentionShape, Heads, PagedAttentionKernel, Storage
from bifolio.kernels.query_split import split_queries


def choose(
    heads: Heads, weights: Array, shape: AttentionShape, segments: tuple[AttentionSegment, ...], storage: Storage | None
) -> NDArray[np.int32]:
    found = np.full((len(heads.query), shape.top_k), -1, np.int32)
    for part in split_queries(segments, shape.top_k).choosing:
        keys = part.keys(heads, shape.layer, storage, np.arange(part.seen + part.stop - part.start - 1))
        for row, seen in part.rows():
            scores = np.maximum(heads.query[row] @ keys[:seen].T * np.float32(shape.scale), 0)  # [heads, seen]
            found[row] = largest(weights[row] @ scores, shape.top_k)
    return found


def largest(scores: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """The places of the largest scores, ascending; of equal ones the first."""
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    above, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
    return np.sort(np.concatenate([above, equal[: count - len(above)]]))


def attend_chosen(
    kernels: PagedAttentionKernel,
    heads: Heads,
    chosen: Array,
    shape: AttentionShape,
    segments: tuple[AttentionSegment, ...],
    storage: Storage | None,
) -> Array:
    """`kernels` attends to the positions of queries that see few."""
    split = split_queries(segments, shape.top_k)
    if not split.choosing:
        return kernels.attend(heads, shape, segments, storage)
    mixed = np.empty((len(heads.query), shape.num_heads * shape.head_dim), np.float32)
    if split.segments:
        mixed[split.rows] = kernels.attend(split.others(heads, storage), shape, split.segments, storage)
    for part in split.choosing:
        for row in range(part.start, part.stop):
            keys = part.keys(heads, shape.layer, storage, chosen[row])  # [top_k, dim]
            scores = (heads.query[row] * np.float32(shape.scale)) @ keys.T
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            mixed[row] = ((shares / shares.sum(axis=-1, keepdims=True)) @ keys).reshape(-1)
    return mixed
