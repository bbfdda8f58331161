"""Tiles of queries: the programs of prefill attention.

queries  |<- sequence 0 ->|<--- sequence 1 --->|<- 2 ->|
tiles    |<- 0 ->|<- 1 ->||<- 2 ->|<- 3 ->|<-4->|<- 5 ->|     a tile never spans two sequences
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bifolio.kernels.interface import AttentionSegment
from bifolio.kernels.torch_arrays import upload


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """The queries of each program."""

    sequence: torch.Tensor  # i32[n]
    first: torch.Tensor  # i32[n]  first query of the tile, relative to the sequence's first
    query_starts: torch.Tensor  # i32[s + 1]
    context_lens: torch.Tensor  # i32[s]
    table_rows: torch.Tensor  # i32[s]  row of each sequence in the block tables


def cut_queries(segment: AttentionSegment, tile: int, device: str, skipped: list[int] | None = None) -> QueryTiles:
    """Tiles of a segment, in order of sequences: the work of a program is bounded by its context.

    `skipped`: sequences without tiles.
    """
    starts = _host(segment.query_starts)
    counts = -(-np.diff(starts) // tile)
    if skipped:
        counts[skipped] = 0
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    before = np.concatenate([[0], np.cumsum(counts)])[:-1]
    first = (np.arange(len(owner)) - before[owner]) * tile
    contexts = _host(segment.context_lens)
    rows = np.arange(len(contexts))
    packed = np.concatenate([owner, first, starts, contexts, rows]).astype(np.int32)  # one copy to the device
    sizes = [len(owner), len(owner), len(starts), len(contexts), len(rows)]
    return QueryTiles(*torch.split(upload(packed, device), sizes))


def _host(values: Any) -> np.ndarray:
    return values.cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)


def tiles_of(lengths: np.ndarray, rows: int, most: int, empty: int) -> list[np.ndarray]:
    """[sequence i64[most], first query i64[most]] of tiles with `rows` rows; unused ones belong to sequence `empty`."""
    counts = -(-lengths // rows)
    owner = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * rows
    unused = np.zeros(most - len(owner), dtype=np.int64)
    return [np.concatenate([owner, unused + empty]), np.concatenate([first, unused])]
