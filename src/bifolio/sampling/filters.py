"""Filters: the tokens that may be drawn and their weights, after top-k, top-p, min-p, typical and XTC, in this order.

The filters work on candidates, the tokens that can survive, sorted by falling logit and rising id. Top-k, top-p and
min-p keep a beginning of that order, so the tokens behind it need never be sorted. Each filter renormalises over the
tokens that the one before it kept. All comparisons are between exact integers or between numbers computed from them one
by one, so a row's result does not depend on its neighbours or on the width to which the candidates are padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.arrays import array_namespace
from bifolio.kernels.weights import ONE, warmth_of
from bifolio.sampling.table import SamplingTable
from bifolio.sampling.weights import (
    Array,
    cleaned,
    column,
    cooled_weights,
    descending_keys,
    device,
    kth_bound,
    sort_candidates,
)


@dataclass(slots=True)
class Filters:
    """The filter settings of the rows at hand; host arrays."""

    top_k: NDArray[np.int64]  # i64[r]  vocabulary size: off
    top_p: NDArray[np.float64]  # f64[r]
    min_p: NDArray[np.float64]  # f64[r]
    typical_p: NDArray[np.float64]  # f64[r]
    xtc_threshold: NDArray[np.float64]  # f64[r]
    xtc_applies: NDArray[np.bool_]  # bool[r]  whether the noise of this position says so

    @classmethod
    def of(cls, table: SamplingTable, slots: NDArray[Any], xtc_noise: NDArray[np.float64] | None) -> Filters:
        """The settings of these slots; xtc_noise: f64[r] in [0, 1), None: leave XTC out."""
        return cls(
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            min_p=table.min_p[slots],
            typical_p=table.typical_p[slots],
            xtc_threshold=table.xtc_threshold[slots],
            xtc_applies=(1.0 if xtc_noise is None else xtc_noise) < table.xtc_probability[slots],
        )


@dataclass(slots=True)
class Candidates:
    """The tokens that may be drawn, by rising id."""

    ids: Array  # i64[r, c]
    weights: Array  # i64[r, c]  0 where not kept
    kept: Array  # bool[r, c]  includes tokens too unlikely to have a weight


def filter_rows(logits: Array, temperature: NDArray[np.float32], filters: Filters) -> Candidates:
    """Candidates of f32[r, n] logits after temperature (f32[r] on the host) and all filters.

    Either every row has a top-k or none has: the two kinds find their candidates in different ways.
    """
    xp = array_namespace(logits)
    logits, highest = cleaned(logits)
    total: Array | None = None
    if filters.top_k[0] < logits.shape[-1]:
        ids, values = _top_k(logits, filters.top_k)
    else:
        mask, total = _likely(cooled_weights(logits, highest, temperature), filters)
        ids, values = sort_candidates(mask, logits)
    weights = cooled_weights(values, highest, temperature)
    kept = (values > -float("inf")) & _likely_enough(weights, total, filters)
    kept = _keep_typical((values - highest) * column(xp, warmth_of(temperature), values), weights, kept, filters)
    kept = _exclude_top_choices(weights, kept, filters)
    return _by_id(xp, ids, _only(xp, weights, kept), kept)


def _top_k(logits: Array, top_k: NDArray[np.int64]) -> tuple[Array, Array]:
    """(i64[r, c] ids, f32[r, c] logits): the largest, ties with the last included; -inf behind them."""
    xp = array_namespace(logits)
    ids, values = sort_candidates(logits >= kth_bound(logits, top_k), logits)
    last = xp.asarray(np.minimum(top_k, values.shape[-1])[:, None] - 1, device=device(values))
    below = values < xp.take_along_axis(values, last, axis=-1)
    return ids, xp.where(below, xp.full_like(values, -float("inf")), values)


def _by_id(xp: Any, ids: Array, weights: Array, kept: Array) -> Candidates:
    order = xp.argsort(xp.where(kept, ids, ids + (1 << 32)), axis=-1)
    ids, weights, kept = (xp.take_along_axis(column, order, axis=-1) for column in (ids, weights, kept))
    return Candidates(ids, weights, kept)


def _only(xp: Any, weights: Array, kept: Array) -> Array:
    return xp.where(kept, weights, xp.zeros_like(weights))


def _likely(weights: Array, filters: Filters) -> tuple[Array, Array]:
    """(bool[r, n] a superset of the tokens that top-p and min-p keep, i64[r, 1] the total weight of the row).

    Tokens of at most (1 - top_p) * total / n each weigh at most (1 - top_p) * total together, so top-p drops them all;
    the factor below 1 covers rounding.
    """
    xp = array_namespace(weights)
    total = xp.sum(weights, axis=-1, keepdims=True)
    share = column(xp, (1.0 - filters.top_p) * (0.999 / weights.shape[-1]), weights)
    floor = np.where(filters.min_p > 0.0, filters.min_p * (0.999 * ONE), np.where(filters.top_p < 1.0, 0.0, -1.0))
    least = xp.maximum(xp.astype(total, xp.float64) * share, column(xp, floor, weights))
    least = xp.where(column(xp, floor, weights) < 0.0, -xp.ones_like(least), least)  # neither: keep all
    return weights > xp.astype(least, xp.int64), total


def _likely_enough(weights: Array, total: Array | None, filters: Filters) -> Array:
    """bool[r, c]: top-p, then min-p. A token stays while the more likely ones have not reached top_p of the total."""
    xp = array_namespace(weights)
    if not (filters.top_p < 1.0).any() and not filters.min_p.any():
        return weights >= 0
    running = xp.cumulative_sum(weights, axis=-1)
    share = np.where(filters.top_p < 1.0, filters.top_p, 2.0)  # 1 is off, for tokens without a weight too
    reach = xp.astype(running[:, -1:] if total is None else total, xp.float64) * column(xp, share, weights)
    keep = xp.astype(running - weights, xp.float64) < reach
    return keep & (xp.astype(weights, xp.float64) >= column(xp, filters.min_p * ONE, weights))


def _keep_typical(values: Array, weights: Array, kept: Array, filters: Filters) -> Array:
    """Typical sampling: the tokens whose surprise is closest to the entropy, until their mass reaches typical_p."""
    rows = np.flatnonzero(filters.typical_p < 1.0)
    if not len(rows):
        return kept
    xp = array_namespace(weights)
    index = xp.asarray(rows, device=device(weights))
    chosen = _only(xp, weights[index, :], kept[index, :])
    distance = _distance_from_entropy(xp, values[index, :], chosen, kept[index, :])
    # Sorting unequal integers is faster than a stable sort, and leaves no choice to the algorithm.
    places = xp.arange(distance.shape[-1], device=device(weights))
    order = xp.sort(descending_keys(-distance, places), axis=-1) & 0xFFFFFFFF
    running = xp.cumulative_sum(xp.take_along_axis(chosen, order, axis=-1), axis=-1)
    mass = xp.astype(running[:, -1:], xp.float64) * column(xp, filters.typical_p[rows], weights)
    last = xp.count_nonzero(xp.astype(running, xp.float64) < mass, axis=-1)[:, None]
    last = xp.clip(last, 0, chosen.shape[-1] - 1)
    farthest = xp.take_along_axis(xp.take_along_axis(distance, order, axis=-1), last, axis=-1)
    kept[index, :] = kept[index, :] & (distance <= farthest)
    return kept


def _distance_from_entropy(xp: Any, values: Array, weights: Array, kept: Array) -> Array:
    """f32[r, c]: |surprise - entropy| of each candidate, infinite for those not kept.

    With shifted logits x and total weight T, the surprise is log T - x and the entropy log T + sum(w * -x) / T, so
    log T cancels. The sum is taken over integers, for the same reason as everywhere here.
    """
    surprise = xp.astype(xp.where(kept, -values, xp.zeros_like(values)), xp.float64)
    weighed = xp.where(weights > 0, surprise, xp.zeros_like(surprise))  # a token without a weight may be infinite
    moments = xp.astype(xp.astype(weights, xp.float64) * weighed, xp.int64)
    total = xp.astype(xp.sum(weights, axis=-1, keepdims=True), xp.float64)
    entropy = xp.astype(xp.sum(moments, axis=-1, keepdims=True), xp.float64) / xp.maximum(total, xp.ones_like(total))
    distance = xp.astype(xp.abs(surprise - entropy), xp.float32)
    return xp.where(kept, distance, xp.full_like(distance, float("inf")))


def _exclude_top_choices(weights: Array, kept: Array, filters: Filters) -> Array:
    """XTC: where it applies, of the tokens that reach the threshold only the least likely stays."""
    if not filters.xtc_applies.any():
        return kept
    xp = array_namespace(weights)
    chosen = _only(xp, weights, kept)
    total = xp.astype(xp.sum(chosen, axis=-1, keepdims=True), xp.float64)
    threshold = column(xp, np.where(filters.xtc_applies, filters.xtc_threshold, 2.0), weights)
    likely = kept & (xp.astype(chosen, xp.float64) >= threshold * total)
    rank = xp.cumulative_sum(xp.astype(likely, xp.int64), axis=-1)
    return kept & ~(likely & (rank < rank[:, -1:]))
