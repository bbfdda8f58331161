"""Probabilities as integers, so that no sum depends on the order in which it was taken.

A token's weight is `exp(logit - largest logit)` in units of 2**-40, cut to an integer. Integer sums are exact: the
total of a row, its running sums, and with them the filters and the draw are bit for bit the same in numpy and torch,
on the CPU and on a GPU, in a batch of one or of a hundred, and for the whole vocabulary or for a padded list of
candidates. A vocabulary of 2**22 tokens fits into 63 bits, and nothing more likely than 1e-12 of the favourite is lost.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace, device, is_torch_array

Array = Any
"""A numpy array or a torch tensor; shapes are given in comments."""

ONE = 1 << 40  # the weight of the most likely token
_LAST = (1 << 63) - 1  # sorts behind every key


def to_weights(shifted: Array) -> Array:
    """i64[..., n] weights of f32[..., n] logits of which the largest is 0."""
    xp = array_namespace(shifted)
    return xp.astype(xp.exp(shifted) * float(ONE), xp.int64)


def shift(logits: Array) -> Array:
    """f32[r, n]: the same distributions with 0 as the largest logit; rows of nothing but -inf stay so.

    What a broken model may produce is made well-defined here: NaN counts as excluded (-inf), +inf as the largest
    finite number. Neither affects other rows.
    """
    xp = array_namespace(logits)
    highest = xp.max(logits, axis=-1, keepdims=True)  # NaN if there is a NaN in the row
    if not bool(xp.all(xp.isfinite(highest))):
        logits = _clean(xp, logits)
        highest = xp.max(logits, axis=-1, keepdims=True)
        highest = xp.where(xp.isfinite(highest), highest, xp.zeros_like(highest))
    return logits - highest


def _clean(xp: Any, logits: Array) -> Array:
    excluded = xp.full_like(logits, -float("inf"))
    largest = xp.full_like(logits, float(xp.finfo(xp.float32).max))
    return xp.where(xp.isnan(logits), excluded, xp.where(logits > largest, largest, logits))


def log_softmax(logits: Array) -> Array:
    """f32[r, n] natural logarithms of the probabilities, each row independent of the others bit for bit."""
    xp = array_namespace(logits)
    shifted = shift(logits)
    return shifted - log_total(xp, to_weights(shifted))


def log_total(xp: Any, weights: Array) -> Array:
    """f32[r, 1]: logarithm of the sum of the exponentials of the shifted logits."""
    total = xp.astype(xp.sum(weights, axis=-1, keepdims=True), xp.float64) / float(ONE)
    return xp.astype(xp.log(total), xp.float32)


def sort_candidates(mask: Array, values: Array) -> tuple[Array, Array]:
    """The tokens that `mask` selects, by falling value and then by rising id.

    mask: bool[r, n]; values: f32[r, n]. Returns (i64[r, c] ids, f32[r, c] values); rows with fewer than c candidates
    end in values of -inf. Value and id are packed into one integer: sorting those is fast, and no two are equal, so
    every sorting algorithm gives the same order.
    """
    xp = array_namespace(values)
    counts = xp.count_nonzero(mask, axis=-1)
    width = max(int(xp.max(counts)), 1)
    rows, ids = xp.nonzero(mask)
    starts = xp.cumulative_sum(counts) - counts
    offsets = xp.arange(rows.shape[0], device=device(values)) - starts[rows]
    keys = xp.full((values.shape[0], width), _LAST, dtype=xp.int64, device=device(values))
    keys[rows, offsets] = _keys(values[rows, ids], ids)
    return _unpack(xp.sort(keys, axis=-1), values)


def _keys(values: Array, ids: Array) -> Array:
    """i64: rising keys order f32 `values` downwards, and equal ones by rising id."""
    xp = array_namespace(values)
    bits = (values + 0.0).view(xp.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # negative floats have their order reversed
    return (xp.astype(~ordered, xp.int64) << 32) | xp.astype(ids, xp.int64)


def _unpack(keys: Array, like: Array) -> tuple[Array, Array]:
    xp = array_namespace(keys)
    padding = keys == _LAST
    ordered = xp.astype(~(keys >> 32), xp.int32)
    values = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(like.dtype)
    ids = xp.where(padding, xp.zeros_like(keys), keys & 0xFFFFFFFF)
    return ids, xp.where(padding, xp.full_like(values, -float("inf")), values)


def kth_largest(values: Array, counts: Array) -> Array:
    """f32[r, 1]: the value at rank `counts[row]` (from 1) of each row of f32[r, n]; counts is a numpy array."""
    xp = array_namespace(values)
    if is_torch_array(values):
        best, _ = values.topk(int(counts.max()), dim=-1)
        index = xp.asarray(counts - 1, dtype=xp.int64, device=device(values))
        return xp.take_along_axis(best, index[:, None], axis=-1)
    found = xp.empty((values.shape[0], 1), dtype=values.dtype)
    for row, count in enumerate(counts):
        split = values.shape[1] - int(count)
        found[row, 0] = xp.partition(values[row], split)[split]
    return found


def draw(weights: Array, noise: Array) -> Array:
    """i64[r]: the first index at which the running sum of i64[r, n] weights exceeds noise times their total.

    noise: f64[r] in [0, 1). Indices of weight 0 are never drawn; the total of each row must be positive.
    """
    xp = array_namespace(weights)
    running = xp.cumulative_sum(weights, axis=-1)
    total = running[:, -1]
    target = xp.astype(noise * xp.astype(total, xp.float64), xp.int64)
    target = xp.minimum(target, total - 1)  # the product may round up to the total
    return xp.count_nonzero(running <= target[:, None], axis=-1)
