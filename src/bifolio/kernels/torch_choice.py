"""Choosing positions by an indexer, and attention to them, on torch tensors: several queries of a sequence at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
import torch.nn.functional as F

from bifolio.kernels.interface import Array, AttentionShape, Heads, PagedAttentionKernel, Segments, Storage
from bifolio.kernels.query_split import ChoosingQueries, LastSplit

MOST_VALUES = 1 << 25  # of the scores, or of the gathered keys, that are computed at once


class TorchChoice(PagedAttentionKernel):
    """`choose` and `attend_chosen` of a kernel set on torch tensors, query by query if the set is deterministic."""

    deterministic: bool

    @cached_property
    def _splits(self) -> LastSplit:
        return LastSplit()

    def choose(
        self, heads: Heads, weights: Array, shape: AttentionShape, segments: Segments, storage: Storage | None
    ) -> torch.Tensor:
        query = heads.query
        found = torch.full((query.shape[0], shape.top_k), -1, dtype=torch.int32, device=query.device)
        for part in self._splits.of(segments, shape.top_k).choosing:
            for rows, ranked in self.index_scores(part, heads, weights, shape, storage):
                best = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : shape.top_k]
                found[rows] = best.sort(dim=-1).values.to(torch.int32)
        return found

    def index_scores(
        self, part: ChoosingQueries, heads: Heads, weights: Array, shape: AttentionShape, storage: Storage | None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of the batch, and their scores of all positions: f32[n, L], -inf where a query does not see one."""
        query = heads.query
        positions = torch.arange(part.seen + part.stop - part.start - 1, device=query.device)
        keys = part.keys(heads, shape.layer, storage, positions).float()
        for rows, seen in self._pieces(part, shape.num_heads * len(positions)):
            scores = torch.relu(query[rows].float() @ keys[: seen[-1]].T * shape.scale)  # [n, heads, L]
            ranked = torch.einsum("nh,nhl->nl", weights[rows].float(), scores)
            ends = torch.arange(seen[0], seen[-1] + 1, device=query.device)
            yield rows, ranked.masked_fill(positions[: seen[-1]] >= ends[:, None], -torch.inf)

    def attend_chosen(
        self, heads: Heads, chosen: Array, shape: AttentionShape, segments: Segments, storage: Storage | None
    ) -> Array:
        split = self._splits.of(segments, shape.top_k)
        if not split.choosing:
            return self.attend(heads, shape, segments, storage)
        query: torch.Tensor = heads.query
        mixed = query.new_zeros((query.shape[0], shape.num_heads * shape.head_dim))
        if split.segments:
            few = self.attend(split.others(heads, storage), shape, split.segments, storage)
            mixed[torch.from_numpy(split.rows).to(query.device)] = few.to(mixed.dtype)
        for part in split.choosing:
            for rows, _ in self._pieces(part, shape.top_k * shape.head_dim):
                keys = part.keys(heads, shape.layer, storage, chosen[rows].long()).to(query.dtype)[:, None]
                found = F.scaled_dot_product_attention(query[rows][:, None], keys, keys, scale=shape.scale)
                mixed[rows] = found.flatten(1)  # the heads of a token are queries over its keys [n, 1, top_k, dim]
        return mixed

    def _pieces(self, part: ChoosingQueries, values: int) -> Iterator[tuple[slice, range]]:
        return pieces(part, 1 if self.deterministic else max(MOST_VALUES // values, 1))


def pieces(part: ChoosingQueries, size: int) -> Iterator[tuple[slice, range]]:
    """The rows of a part in pieces, each with the numbers of positions that its queries see."""
    for start in range(part.start, part.stop, size):
        stop, first = min(start + size, part.stop), part.seen + start - part.start
        yield slice(start, stop), range(first, first + stop - start)
