"""Choosing positions by an indexer, and attention to them, on torch tensors: several queries of a sequence at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from bifolio.kernels.interface import Array, AttentionShape, Heads, PagedAttentionKernel, Storage
from bifolio.kernels.query_split import ChoosingQueries, QuerySplit

MOST_VALUES = 1 << 25  # of the scores, or of the gathered keys, that are computed at once


def choose(
    heads: Heads,
    weights: torch.Tensor,  # [t, heads]
    shape: AttentionShape,
    split: QuerySplit,
    storage: Storage | None,
    most: int | None = None,  # queries that are computed at once; None: as many as memory allows
) -> torch.Tensor:
    query = heads.query
    found = torch.full((query.shape[0], shape.top_k), -1, dtype=torch.int32, device=query.device)
    for part in split.choosing:
        positions = torch.arange(part.seen + part.stop - part.start - 1, device=query.device)
        keys = part.keys(heads, shape.layer, storage, positions).float()
        for rows, seen in _pieces(part, shape.num_heads * len(positions), most):
            scores = torch.relu(query[rows].float() @ keys[: seen[-1]].T * shape.scale)  # [n, heads, L]
            ranked = torch.einsum("nh,nhl->nl", weights[rows].float(), scores)
            ends = torch.arange(seen[0], seen[-1] + 1, device=query.device)
            ranked = ranked.masked_fill(positions[: seen[-1]] >= ends[:, None], -torch.inf)
            best = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, : shape.top_k]
            found[rows] = best.sort(dim=-1).values.to(torch.int32)
    return found


def attend_chosen(
    kernels: PagedAttentionKernel,
    heads: Heads,
    chosen: Array,
    shape: AttentionShape,
    split: QuerySplit,
    storage: Storage | None,
    most: int | None = None,
) -> torch.Tensor:
    """`kernels` attends to the positions of queries that see few; there are others, too."""
    query: torch.Tensor = heads.query
    mixed = query.new_zeros((query.shape[0], shape.num_heads * shape.head_dim))
    if split.segments:
        few = kernels.attend(split.others(heads, storage), shape, split.segments, storage)
        mixed[torch.from_numpy(split.rows).to(query.device)] = few.to(mixed.dtype)
    for part in split.choosing:
        for rows, _ in _pieces(part, shape.top_k * shape.head_dim, most):
            keys = part.keys(heads, shape.layer, storage, chosen[rows].long()).to(query.dtype)[:, None]
            found = F.scaled_dot_product_attention(query[rows][:, None], keys, keys, scale=shape.scale)
            mixed[rows] = found.flatten(1)  # the heads of a token are queries over its keys [n, 1, top_k, dim]
    return mixed


def _pieces(part: ChoosingQueries, values: int, most: int | None) -> Iterator[tuple[slice, range]]:
    """The rows of a part in pieces, each with the numbers of positions that its queries see."""
    size = max(MOST_VALUES // values, 1) if most is None else most
    for start in range(part.start, part.stop, size):
        stop, first = min(start + size, part.stop), part.seen + start - part.start
        yield slice(start, stop), range(first, first + stop - start)
