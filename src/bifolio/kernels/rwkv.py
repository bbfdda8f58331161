"""The two recurrences of a layer of RWKV-7 in numpy, token by token (see `Recurrence`): `shift` and `rwkv`."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from bifolio.kernels.interface import Array, Recurrence, StateUse, Storage

SLOWEST = -math.exp(-0.5)  # logarithm of the largest decay of a token
LEAST_LENGTH = 1e-12  # of a removed key before it is divided by its length


def recur(x: Array, r: Recurrence, use: StateUse, storage: Storage | None) -> Array:
    """[t, out_features]"""
    return (_shift if r.kind == "shift" else _rwkv)(x, r, use, storage)


def _shift(x: Array, r: Recurrence, use: StateUse, storage: Storage | None) -> Array:
    out = np.empty((x.shape[0], r.out_features), np.float32)
    columns = slice(r.column, r.column + r.channels)
    for read, (start, end) in zip(use.reads, pairwise(use.starts), strict=True):
        before = np.zeros(r.channels, np.float32)
        if storage is not None and read > 0:
            before = storage.convolutions[r.layer][read, 0, columns].copy()
        for token in range(start, end):
            out[token] = (x[token] + r.factors * (before - x[token])).reshape(-1)
            before = x[token]
            if storage is not None and use.writes[token] >= 0:
                storage.convolutions[r.layer][use.writes[token], 0, columns] = before
    return out


def _rwkv(x: Array, r: Recurrence, use: StateUse, storage: Storage | None) -> Array:
    out = np.empty((x.shape[0], r.out_features), np.float32)
    for read, (start, end) in zip(use.reads, pairwise(use.starts), strict=True):
        state = np.zeros((r.heads, r.key_size, r.value_size), np.float32)
        if storage is not None and read > 0:
            state = storage.recurrent[r.layer][read].copy()
        for token in range(start, end):
            out[token], state = _step(x[token], state, r)
            if storage is not None and use.writes[token] >= 0:
                storage.recurrent[r.layer][use.writes[token]] = state
    return out


def _step(row: Array, state: Array, r: Recurrence) -> tuple[Array, Array]:
    """The output of a token, and the state behind it."""
    keys, inner = r.heads * r.key_size, r.heads * r.value_size
    query, w, key, value, a, gate, *mixed = np.split(row, np.cumsum([keys, keys, keys, inner, keys, inner, inner])[:-1])
    if r.mixes_values:
        amount, first = np.split(np.concatenate(mixed), 2)
        value = value + _sigmoid(amount) * (first - value)
    a, factors = _sigmoid(a), np.asarray(r.factors)
    removed = (key * factors[0]).reshape(r.heads, r.key_size)
    removed = removed / np.maximum(np.sqrt((removed * removed).sum(axis=-1, keepdims=True)), np.float32(LEAST_LENGTH))
    key = key * (1 + (a - 1) * factors[1])
    decay = np.exp(np.float32(SLOWEST) * _sigmoid(w))
    bonus = (query * key * factors[2]).reshape(r.heads, -1).sum(axis=-1, keepdims=True)

    query, key, decay, a = (part.reshape(r.heads, r.key_size, 1) for part in (query, key, decay, a))
    removed, value = removed[:, :, None], value.reshape(r.heads, r.value_size)
    known = (state * removed).sum(axis=1)[:, None, :]
    state = decay * state - a * removed * known + key * value[:, None, :]
    y = _norm((state * query).sum(axis=1), r) + bonus * value
    return y.reshape(-1) * gate, state


def _norm(y: Array, r: Recurrence) -> Array:
    """Layer norm of each head: [heads, value_size]."""
    if r.norm is None:
        return y
    y = y - y.mean(axis=-1, keepdims=True)
    y = y / np.sqrt((y * y).mean(axis=-1, keepdims=True) + np.float32(r.norm.eps))
    y = y * r.norm.weight.reshape(y.shape)
    return y if r.norm.bias is None else y + r.norm.bias.reshape(y.shape)


def _sigmoid(x: Array) -> Array:
    return np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x))
