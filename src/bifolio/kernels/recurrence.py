"""The definition of `KernelSet.recur` in numpy: one token of one sequence after the other (see `Recurrence`)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from bifolio.kernels import rwkv
from bifolio.kernels.interface import Array, Batch, Norm, Recurrence, StateUse, Storage

L2_EPS = 1e-6  # of the norms of q and k in the delta rule


def states_of(batch: Batch) -> StateUse:
    """The states of a batch; without any, each sequence of its segments continues the empty state and writes none."""
    if batch.states is not None:
        return batch.states
    starts = [int(s.token_start) + int(first) for s in batch.segments for first in s.query_starts[:-1]]
    return StateUse(
        starts=np.array([*starts, batch.num_tokens], np.int32),
        reads=np.zeros(len(starts), np.int32),
        writes=np.full(batch.num_tokens, -1, np.int32),
    )


def recur(x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
    """[t, out_features]"""
    r, use = recurrence, states_of(batch)
    if r.is_rwkv:
        return rwkv.recur(x, r, use, storage)
    step = STEPS[r.kind]
    out = np.empty((x.shape[0], r.out_features), np.float32)
    for read, (start, end) in zip(use.reads, pairwise(use.starts), strict=True):
        window = np.zeros((r.width - 1, r.channels), np.float32)
        state = np.zeros((r.heads, r.key_size, r.value_size), np.float32)
        if storage is not None and read > 0:
            window, state = storage.convolutions[r.layer][read], storage.recurrent[r.layer][read].copy()
        for token in range(start, end):
            out[token], window, state = step(x[token], window, state, r)
            if storage is not None and use.writes[token] >= 0:
                storage.convolutions[r.layer][use.writes[token]] = window
                if not r.by_channel:  # `scan` writes its state
                    storage.recurrent[r.layer][use.writes[token]] = state
    return out


def scan(x: Array, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> Array:
    """[t, channels]"""
    return (_scan_units if recurrence.kind == "lru" else _scan_selective)(x, recurrence, batch, storage)


def _scan_units(x: Array, r: Recurrence, batch: Batch, storage: Storage | None) -> Array:
    use, out = states_of(batch), np.empty((x.shape[0], r.channels), np.float32)
    values, gates = x[:, : r.channels], _sigmoid(x[:, r.channels :] + r.bias)
    steps = gates[:, : r.channels] * r.decay
    inputs = gates[:, r.channels :] * values
    for read, (start, end) in zip(use.reads, pairwise(use.starts), strict=True):
        state, begins = np.zeros(r.channels, np.float32), storage is None or read <= 0
        if storage is not None and not begins:
            state = storage.recurrent[r.layer][read][0, 0]
        for token in range(start, end):
            factor = 1 if begins and token == start else np.sqrt(-np.expm1(2 * steps[token]))
            state = np.exp(steps[token]) * state + factor * inputs[token]
            out[token] = state
            if storage is not None and use.writes[token] >= 0:
                storage.recurrent[r.layer][use.writes[token]] = state[None, None]
    return out


def _scan_selective(x: Array, r: Recurrence, batch: Batch, storage: Storage | None) -> Array:
    use = states_of(batch)
    z, values, steps, b, c = np.split(x, np.cumsum([r.channels] * 3 + [r.key_size]), axis=-1)
    steps, out = _softplus(steps), np.empty((x.shape[0], r.channels), np.float32)
    for read, (start, end) in zip(use.reads, pairwise(use.starts), strict=True):
        state = np.zeros((r.key_size, r.channels), np.float32)
        if storage is not None and read > 0:
            state = storage.recurrent[r.layer][read][0].copy()
        for token in range(start, end):
            change = b[token][:, None] * (steps[token] * values[token])
            state = state * np.exp(steps[token] * r.decay) + change
            out[token] = (c[token][:, None] * state).sum(axis=0)
            if storage is not None and use.writes[token] >= 0:
                storage.recurrent[r.layer][use.writes[token]] = state[None]
    return (out + r.skip * values) * _silu(z)


def _conv_step(row: Array, window: Array, state: Array, r: Recurrence) -> tuple[Array, Array, Array]:
    b, c, x = np.split(row, 3)
    y, window = _convolve(b * x, window, r)
    return c * y, window, state


def _selective_step(row: Array, window: Array, state: Array, r: Recurrence) -> tuple[Array, Array, Array]:
    y, window = _convolve(row, window, r)
    return y if r.kind == "lru" else _silu(y), window, state


def _delta_step(row: Array, window: Array, state: Array, r: Recurrence) -> tuple[Array, Array, Array]:
    keys, inner = r.groups * r.key_size, r.heads * r.value_size
    mixed, z, beta, a = np.split(row, np.cumsum([2 * keys + inner, inner, r.heads]))
    mixed, window = _convolve(mixed, window, r)
    q, k, v = np.split(_silu(mixed), [keys, 2 * keys])
    q, k = (_to_heads(_unit(part.reshape(r.groups, r.key_size)), r)[:, :, None] for part in (q, k))  # [H, K, 1]
    q = q / np.float32(np.sqrt(r.key_size))
    steps, decay = (a + r.bias).reshape(r.heads, -1, 1), np.asarray(r.decay)[:, None, None]  # keyed: [H, K, 1]
    if r.decay_bound:
        state = state * np.exp(-np.float32(r.decay_bound) * _sigmoid(-decay * steps))
    else:
        state = state * np.exp(_softplus(steps) * decay)
    change = (
        np.float32(r.rate_scale)
        * _sigmoid(beta)[:, None]
        * (v.reshape(r.heads, r.value_size) - (state * k).sum(axis=1))
    )
    state = state + k * change[:, None, :]
    y = _norm((state * q).sum(axis=1), r.norm)
    return y.reshape(-1) * (_sigmoid(z) if r.kind == "keyed" else _silu(z)), window, state


def _mamba_step(row: Array, window: Array, state: Array, r: Recurrence) -> tuple[Array, Array, Array]:
    keys, inner = r.groups * r.key_size, r.heads * r.value_size
    z, mixed, dt = np.split(row, np.cumsum([inner, inner + 2 * keys]))
    mixed, window = _convolve(mixed, window, r)
    x, b, c = np.split(_silu(mixed), np.cumsum([inner, keys]))
    b, c = (_to_heads(part.reshape(r.groups, r.key_size), r)[:, :, None] for part in (b, c))  # [H, K, 1]
    x = x.reshape(r.heads, r.value_size)
    if r.kind == "lightning":
        decay: Array = r.decay
        state = state * np.exp(decay)[:, None, None] + b * x[:, None, :]
        return _norm((state * c).sum(axis=1).reshape(1, -1), r.norm).reshape(-1) * _sigmoid(z), window, state
    least, most = r.dt_limits
    dt = np.clip(_softplus(dt + r.bias), np.float32(least), np.float32(most))
    state = state * np.exp(dt * r.decay)[:, None, None] + b * (dt[:, None] * x)[:, None, :]
    y = (state * c).sum(axis=1)
    y = (y if r.skip is None else y + r.skip[:, None] * x).reshape(-1)
    if r.norm is None:
        return y * _silu(z), window, state
    if not r.norm_first:
        y = y * _silu(z)
    y = _norm(y.reshape(r.norm_groups, -1), r.norm).reshape(-1)
    return y * _silu(z) if r.norm_first else y, window, state


STEPS = {
    "conv": _conv_step, "delta": _delta_step, "keyed": _delta_step, "mamba": _mamba_step, "lightning": _mamba_step,
    "selective": _selective_step, "lru": _selective_step,
}  # fmt: skip


def _convolve(x: Array, window: Array, r: Recurrence) -> tuple[Array, Array]:
    """The convolution at the newest inputs f32[channels], and the window of the next token."""
    inputs = np.concatenate([window, x[None]])
    y = (inputs * r.conv_weight.T).sum(axis=0)
    return y if r.conv_bias is None else y + r.conv_bias, inputs[1:]


def _to_heads(groups: Array, r: Recurrence) -> Array:
    """[heads, K] from [groups, K]."""
    shared = r.heads // r.groups
    return np.tile(groups, (shared, 1)) if r.tiled else np.repeat(groups, shared, axis=0)


def _unit(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + np.float32(L2_EPS))


def _norm(x: Array, norm: Norm | None) -> Array:
    """RMS norm of each row; the weights are of one row or of all rows one after the other."""
    if norm is None:
        return x
    y = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(norm.eps))
    return y * norm.weight.reshape(-1, x.shape[-1])


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _sigmoid(x: Array) -> Array:
    return np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x))


def _softplus(x: Array) -> Array:
    return np.logaddexp(np.float32(0), x)
