"""The part of an adapter that one rank of tensor parallelism holds: the changes of the rows that the rank computes.

Parts are exact (`model.shards`): every rank has the whole input of a product, and computes whole rows of it. So it
holds the whole of `down`, and its own rows of `up`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bifolio.errors import ConfigError
from bifolio.kernels.interface import Adapter, Experts, Linear, LowRank
from bifolio.model.adapters.sites import changed_products, head_site, with_sites
from bifolio.model.recurrent_shards import Span
from bifolio.model.shards import shard
from bifolio.model.weights import ModelWeights


class RankRows(NamedTuple):
    """The rows of each product that a rank computes: spans of the whole product, side by side on the rank."""

    products: Mapping[int, Sequence[Span]]  # by sites
    experts: Mapping[int, Sequence[Span]]  # of `down` of each expert, by sites


def rows_of_ranks(weights: ModelWeights, size: int) -> list[RankRows]:
    """The rows of each rank, read from parts of weights whose values are the numbers of their rows."""
    indexed = _indexed(with_sites(weights))
    return [_rows_of(shard(indexed, rank, size, exact=True)) for rank in range(size)]


def rank_part(adapter: Adapter, rows: RankRows, num_layers: int) -> Adapter:
    """The changes of a rank's rows."""
    if adapter.embedding or head_site(num_layers) in adapter.products:
        raise ConfigError(
            "adapters that change the head or the embedding run in one process: pass tensor_parallel_size=1, or merge "
            "the adapter into the model"
        )
    return Adapter(
        {site: _cut(parts, rows.products[site]) for site, parts in adapter.products.items()},
        {
            site: tuple(each._replace(down=_cut(each.down, rows.experts[site])) for each in experts)
            for site, experts in adapter.experts.items()
        },
    )


def _cut(parts: Sequence[LowRank], spans: Sequence[Span]) -> tuple[LowRank, ...]:
    """The changes of these rows, which lie side by side."""
    found = []
    for part in parts:
        place = 0  # of a span on the rank
        for start, stop in spans:
            first, last = max(start, part.column), min(stop, part.column + len(part.up))
            if first < last:
                own = slice(first - part.column, last - part.column)
                bias = None if part.bias is None else part.bias[own]
                found.append(LowRank(place + first - start, part.down, part.up[own], bias))
            place += stop - start
    return tuple(found)


def _indexed(weights: ModelWeights) -> ModelWeights:
    """The weights with the number of its row in place of each value of a product; they take no memory."""

    def numbered(role: str, linear: Linear) -> Linear:
        parts, first = [], 0
        for part in linear.parts:
            rows, columns = int(part.shape[0]), int(part.shape[1])
            parts.append(np.broadcast_to(np.arange(first, first + rows)[:, None], (rows, columns)))
            first += rows
        return replace(linear, parts=tuple(parts))

    def of_experts(experts: Experts) -> Experts:
        return replace(experts, down=tuple(numbered("", linear) for linear in experts.down))

    return replace(weights, layers=tuple(changed_products(layer, numbered, of_experts) for layer in weights.layers))


def _rows_of(part: ModelWeights) -> RankRows:
    products: dict[int, list[Span]] = {}
    experts: dict[int, list[Span]] = {}

    def note(role: str, linear: Linear) -> Linear:
        products[linear.site] = _spans(linear)
        return linear

    def note_experts(own: Experts) -> Experts:
        experts[own.site] = _spans(own.down[0])
        return own

    for layer in part.layers:
        changed_products(layer, note, note_experts)
    return RankRows(products, experts)


def _spans(linear: Linear) -> list[Span]:
    """Consecutive rows as spans."""
    rows = np.concatenate([np.asarray(part)[:, 0] for part in linear.parts])
    borders = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
    return [(int(rows[first]), int(rows[last - 1]) + 1) for first, last in itertools.pairwise(borders)]
