"""Choosing positions by an indexer, and attention to them, on a GPU: a few kernels for all queries of a pass."""

from __future__ import annotations

import torch

from bifolio.kernels.interface import Array, AttentionShape, Heads, Segments, Storage
from bifolio.kernels.torch_choice import MOST_VALUES, TorchChoice
from bifolio.kernels.triton.attention import Attention
from bifolio.kernels.triton.chosen_attention import chosen_attention
from bifolio.kernels.triton.index_scores import index_scores
from bifolio.kernels.triton.lazy_fusion import tensor
from bifolio.kernels.triton.top_positions import top_positions


class TritonChoice(TorchChoice):
    """`choose` and `attend_chosen` over a cache; torch operations without one."""

    attention: Attention
    num_processors: int

    def choose(
        self, heads: Heads, weights: Array, shape: AttentionShape, segments: Segments, storage: Storage | None
    ) -> torch.Tensor:
        own = tensor(weights)
        if storage is None or not _has_tables(segments):
            return super().choose(heads, own, shape, segments, storage)
        rows, query = self.attention.rows_of(segments), heads.query
        found = torch.full((query.shape[0], shape.top_k), -1, dtype=torch.int32, device=query.device)
        for part in rows.pieces(shape.top_k, MOST_VALUES):
            ranked = index_scores(query, own, shape, storage, rows, part, num_processors=self.num_processors)
            top_positions(ranked, rows, found, first=part[0])
        return found

    def attend_chosen(
        self, heads: Heads, chosen: Array, shape: AttentionShape, segments: Segments, storage: Storage | None
    ) -> Array:
        if storage is None or not _has_tables(segments):
            return super().attend_chosen(heads, chosen, shape, segments, storage)
        return chosen_attention(
            heads.query, chosen, shape, storage, self.attention.rows_of(segments), num_processors=self.num_processors,
            fixed=self.deterministic,
        )  # fmt: skip


def _has_tables(segments: Segments) -> bool:
    return all(segment.block_tables is not None for segment in segments)
