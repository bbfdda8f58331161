"""Attention as the reference set defines it: one softmax over all visible keys, and the mask of these."""

from __future__ import annotations

import math

import numpy as np

from bifolio.arrays import array_namespace
from bifolio.kernels.distances import bias_columns, both_ways_mask
from bifolio.kernels.host_math import as_float32
from bifolio.kernels.interface import Array, AttentionShape


def scale_by_position(query: Array, shape: AttentionShape, length: int) -> Array:
    """Queries [n, h, d] at the last n of `length` positions, multiplied by the temperature at their positions."""
    if not shape.temperature:
        return query
    positions = np.arange(length - query.shape[0], length) + shape.temperature_start
    factors = 1 + shape.temperature * np.log(1 + positions // shape.temperature_period)
    xp = array_namespace(query)
    scaled = query * xp.asarray(factors.astype(np.float32))[:, None, None]
    return xp.astype(scaled, query.dtype)


def attend_heads(query: Array, key: Array, value: Array, shape: AttentionShape, causal: bool = True) -> Array:
    """`causal_attention` with the constants of a layer."""
    constants = shape.scale, shape.window, shape.softcap, shape.sinks, shape.in_chunks, shape.slopes, causal
    return causal_attention(query, key, value, *constants, shape.bidirectional, shape.bias)


def causal_attention(
    query: Array,
    key: Array,
    value: Array,
    scale: float,
    window: int | None,
    softcap: float = 0.0,
    sinks: Array | None = None,
    in_chunks: bool = False,
    slopes: Array | None = None,
    causal: bool = True,
    bidirectional: bool = False,
    bias: Array | None = None,
) -> Array:
    """Queries [n, h, d] at the last n of the L positions that keys and values [L, kv, d] cover: [n, h * d].

    Query i has position L − n + i and attends to positions ≤ its own, at most `window` of them; not `causal`: also to
    all after its own; `bidirectional`: to all positions whose distance is below the window.
    """
    xp = array_namespace(query)
    num_queries, heads, dim = query.shape
    length, kv_heads, _ = key.shape
    key, value = xp.astype(key, query.dtype), xp.astype(value, query.dtype)
    grouped = xp.permute_dims(xp.reshape(query, (num_queries, kv_heads, heads // kv_heads, dim)), (1, 2, 0, 3))
    keys = xp.permute_dims(key, (1, 2, 0))[:, None, :, :]  # [kv, 1, d, L]
    values = xp.permute_dims(value, (1, 0, 2))[:, None, :, :]  # [kv, 1, L, d]
    scores = as_float32(xp, (grouped * scale) @ keys)  # [kv, group, n, L]
    if softcap:
        scores = xp.tanh(scores / softcap) * softcap
    if slopes is not None:
        falls = np.minimum(np.arange(length)[None, :] - np.arange(length - num_queries, length)[:, None], 0)
        steps = xp.asarray(falls.astype(np.float32))
        scores = scores + xp.reshape(slopes, (kv_heads, heads // kv_heads, 1, 1)) * steps
    if bias is not None:
        biases = bias[:, _beside(query, bias_columns(num_queries, length, bias.shape[-1]))]
        scores = scores + xp.reshape(biases, (kv_heads, heads // kv_heads, num_queries, length))
    if bidirectional:
        mask = both_ways_mask(num_queries, length, window)
    else:
        mask = causal_mask(num_queries, length, window, in_chunks, causal)
    mask = _beside(query, mask)
    scores = xp.where(mask, scores, xp.full_like(scores, -math.inf))
    if sinks is not None:
        columns = xp.reshape(sinks, (kv_heads, heads // kv_heads, 1, 1))
        scores = xp.concat([scores, xp.broadcast_to(columns, (*scores.shape[:-1], 1))], axis=-1)
    weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    weights = weights / xp.sum(weights, axis=-1, keepdims=True)
    weights = weights[..., :length]
    mixed = xp.astype(weights, query.dtype) @ values  # [kv, group, n, d]
    return xp.reshape(xp.permute_dims(mixed, (2, 0, 1, 3)), (num_queries, heads * dim))


def causal_mask(
    num_queries: int, length: int, window: int | None, in_chunks: bool = False, causal: bool = True
) -> np.ndarray:
    """bool[num_queries, length]: True where a query attends to a key."""
    positions, keys = np.arange(length - num_queries, length)[:, None], np.arange(length)[None, :]
    distance = positions - keys
    visible = distance >= 0 if causal else np.ones(distance.shape, np.bool_)
    if window is not None and in_chunks:
        return visible & (keys >= positions - positions % window)
    return visible if window is None else visible & (distance < window)


def _beside(x: Array, array: np.ndarray) -> Array:
    """The array beside `x`, on its device."""
    return array if isinstance(x, np.ndarray) else array_namespace(x).asarray(array, device=x.device)
