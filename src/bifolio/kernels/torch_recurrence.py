"""`KernelSet.recur` on torch tensors: the state runs token by token, all other parts over all tokens of a sequence.

Sequences of equal lengths (a decode step, a batch of equal prompts) run together, others one after the other. The state
is in float32, and no tensor of the graph is changed in place: the operation is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from bifolio.kernels import torch_rwkv
from bifolio.kernels.interface import Array, Batch, Norm, Recurrence, Storage
from bifolio.kernels.recurrence import L2_EPS, states_of


def prepare_vectors(recurrence: Recurrence, vector: Callable[[Array], torch.Tensor]) -> Recurrence:
    """The parameters as tensors; `vector` creates one in f32 on the set's device."""
    names = ("conv_weight", "conv_bias", "decay", "bias", "skip", "factors")
    moved: dict[str, Any] = {name: vector(value) for name in names if (value := getattr(recurrence, name)) is not None}
    norm = recurrence.norm
    if norm is not None:
        norm_bias = None if norm.bias is None else vector(norm.bias)
        norm = replace(norm, weight=vector(norm.weight), bias=norm_bias)
    return replace(recurrence, **moved, norm=norm)


def recur(x: torch.Tensor, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> torch.Tensor:
    """[t, out_features]"""
    use = states_of(batch)
    starts, reads, writes = (_host(part) for part in (use.starts, use.reads, use.writes))
    lengths = np.diff(starts)
    if len(set(lengths.tolist())) == 1:
        return _recur_equal(x, recurrence, reads, writes, storage)
    parts = [
        _recur_equal(x[a:b], recurrence, reads[i : i + 1], writes[a:b], storage)
        for i, (a, b) in enumerate(pairwise(starts.tolist()))
        if a < b
    ]
    return torch.cat(parts) if parts else x.new_zeros((0, recurrence.out_features))


def scan(x: torch.Tensor, recurrence: Recurrence, batch: Batch, storage: Storage | None) -> torch.Tensor:
    """The scan of a recurrence by channel: [t, channels]."""
    return (_scan_units if recurrence.kind == "lru" else _scan_selective)(x, recurrence, batch, storage)


def _scan_units(x: torch.Tensor, r: Recurrence, batch: Batch, storage: Storage | None) -> torch.Tensor:
    use = states_of(batch)
    starts, reads, writes = (_host(part) for part in (use.starts, use.reads, use.writes))
    (decay, bias), outputs = _given(r), []
    values, gates = torch.split(x.float(), [r.channels, 2 * r.channels], dim=-1)
    recurrent, entering = torch.sigmoid(gates + bias).chunk(2, dim=-1)
    steps, inputs = recurrent * decay, entering * values
    for i, (start, end) in enumerate(pairwise(starts.tolist())):
        begins = storage is None or reads[i] <= 0
        state = values.new_zeros(r.channels)
        if storage is not None and not begins:
            state = storage.recurrent[r.layer][int(reads[i])][0, 0]
        for token in range(start, end):
            is_first = begins and token == start
            entered = inputs[token] if is_first else torch.sqrt(-torch.expm1(2 * steps[token])) * inputs[token]
            state = torch.exp(steps[token]) * state + entered
            outputs.append(state)
            if storage is not None and writes[token] >= 0:
                storage.recurrent[r.layer][int(writes[token])] = state[None, None].detach()
    result: torch.Tensor = (torch.stack(outputs) if outputs else values).to(x.dtype)
    return result


def _scan_selective(x: torch.Tensor, r: Recurrence, batch: Batch, storage: Storage | None) -> torch.Tensor:
    use = states_of(batch)
    starts, reads, writes = (_host(part) for part in (use.starts, use.reads, use.writes))
    sizes = [r.channels] * 3 + [r.key_size] * 2
    z, values, steps, b, c = torch.split(x.float(), sizes, dim=-1)
    steps, (decay, _), skip, outputs = F.softplus(steps), _given(r), _skip(r), []
    for i, (start, end) in enumerate(pairwise(starts.tolist())):
        state = values.new_zeros(r.key_size, r.channels)
        if storage is not None and reads[i] > 0:
            state = storage.recurrent[r.layer][int(reads[i])][0]
        for token in range(start, end):
            change = b[token][:, None] * (steps[token] * values[token])
            state = state * torch.exp(steps[token] * decay) + change
            outputs.append((c[token][:, None] * state).sum(dim=0))
            if storage is not None and writes[token] >= 0:
                storage.recurrent[r.layer][int(writes[token])] = state[None].detach()
    y = torch.stack(outputs) if outputs else values
    result: torch.Tensor = ((y + skip * values) * F.silu(z)).to(x.dtype)
    return result


def _recur_equal(
    x: torch.Tensor, r: Recurrence, reads: np.ndarray, writes: np.ndarray, storage: Storage | None
) -> torch.Tensor:
    """Sequences of equal lengths, one after the other in `x`."""
    rows: Array = x.float().reshape(len(reads), -1, x.shape[-1])  # [s, n, in_features]
    window = rows.new_zeros(len(reads), r.width - 1, r.window or r.channels)
    state = rows.new_zeros(len(reads), r.heads, r.key_size, r.value_size)
    if storage is not None:
        index = torch.from_numpy(reads.astype(np.int64)).to(x.device)
        window, state = storage.convolutions[r.layer][index], storage.recurrent[r.layer][index]
    if r.is_rwkv:
        return torch_rwkv.recur_equal(rows, r, writes.reshape(len(reads), -1), window, state, storage).to(x.dtype)
    inner, keys = r.heads * r.value_size, r.groups * r.key_size
    y: Array
    if r.kind == "conv":
        b, c, inputs = rows.chunk(3, dim=-1)
        inputs = torch.cat([window, b * inputs], dim=1)
        y, states = c * _convolve(inputs, r), [state] * rows.shape[1]
    elif r.by_channel:
        inputs = torch.cat([window, rows], dim=1)
        mixed = _convolve(inputs, r)
        y, states = mixed if r.kind == "lru" else F.silu(mixed), []
    elif r.has_delta_rule:
        mixed, z, beta, a = rows.split((2 * keys + inner, inner, r.heads, len(_given(r)[1])), dim=-1)
        inputs = torch.cat([window, mixed], dim=1)
        q, k, v = torch.split(F.silu(_convolve(inputs, r)), [keys, keys, inner], dim=-1)
        y, states = _delta_rule(q, k, v, beta, a, state, r)
        y = _norm(y, r.norm).flatten(2) * (torch.sigmoid(z) if r.kind == "keyed" else F.silu(z))
    else:
        sizes = inner, inner + 2 * keys, 0 if r.kind == "lightning" else r.heads
        z, mixed, dt = rows.split(sizes, dim=-1)
        inputs = torch.cat([window, mixed], dim=1)
        v, b, c = torch.split(F.silu(_convolve(inputs, r)), [inner, keys, keys], dim=-1)
        y, states = _mamba_scan(v, b, c, dt, state, r)
        y = _gated_norm(y.flatten(2), torch.sigmoid(z) if r.kind == "lightning" else F.silu(z), r)
    _write_states(r, storage, writes.reshape(len(reads), -1), inputs, states)
    result: torch.Tensor = y.flatten(0, 1).to(x.dtype)
    return result


def _delta_rule(
    q: Array, k: Array, v: Array, beta: Array, a: Array, state: Array, r: Recurrence
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """[s, n, H, V], and the states after each token."""
    q, k = (_to_heads(_unit(part.unflatten(-1, (r.groups, r.key_size))), r)[..., None] for part in (q, k))
    q, v = q / r.key_size**0.5, v.unflatten(-1, (r.heads, r.value_size))
    own_decay, bias = _given(r)
    steps: Array = (a + bias).unflatten(-1, (r.heads, -1))  # keyed: [s, n, H, K]
    if r.decay_bound:
        logarithms = -r.decay_bound * torch.sigmoid(-own_decay[:, None] * steps)
    else:
        logarithms = own_decay[:, None] * F.softplus(steps)
    decay, beta = torch.exp(logarithms)[..., None], (r.rate_scale * torch.sigmoid(beta))[..., None]
    outputs, states = [], []
    for i in range(v.shape[1]):
        state = state * decay[:, i]
        change = beta[:, i] * (v[:, i] - (state * k[:, i]).sum(dim=2))
        state = state + k[:, i] * change[:, :, None]
        outputs.append((state * q[:, i]).sum(dim=2))
        states.append(state)
    return torch.stack(outputs, dim=1), states


def _mamba_scan(
    x: Array, b: Array, c: Array, dt: Array, state: Array, r: Recurrence
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """[s, n, H, V], and the states after each token."""
    b, c = (_to_heads(part.unflatten(-1, (r.groups, r.key_size)), r)[..., None] for part in (b, c))
    x = x.unflatten(-1, (r.heads, r.value_size))
    own_decay, bias = _given(r)
    dt = torch.ones_like(x[..., 0]) if r.kind == "lightning" else F.softplus(dt + bias).clamp(*r.dt_limits)
    decay, change = torch.exp(dt * own_decay)[..., None, None], (dt[..., None] * x)[:, :, :, None]
    outputs, states = [], []
    for i in range(x.shape[1]):
        state = state * decay[:, i] + b[:, i] * change[:, i]
        outputs.append((state * c[:, i]).sum(dim=2))
        states.append(state)
    y = torch.stack(outputs, dim=1)
    return y if r.skip is None else y + r.skip[:, None] * x, states


def _given(r: Recurrence) -> tuple[Array, Array]:
    """Decay and bias, which all kinds but convolutions have."""
    return r.decay, r.bias


def _skip(r: Recurrence) -> Array:
    return r.skip


def _convolve(inputs: torch.Tensor, r: Recurrence) -> torch.Tensor:
    """[s, n, channels] from the inputs [s, width - 1 + n, channels]."""
    taps = r.conv_weight.unbind(dim=1)
    count = inputs.shape[1] - len(taps) + 1
    y = sum((inputs[:, i : i + count] * tap for i, tap in enumerate(taps)), torch.zeros_like(inputs[:, :count]))
    return y if r.conv_bias is None else y + r.conv_bias


def _write_states(
    r: Recurrence, storage: Storage | None, writes: np.ndarray, inputs: torch.Tensor, states: list[torch.Tensor]
) -> None:
    if storage is None:
        return
    for i, token in np.argwhere(writes >= 0).tolist():
        target = int(writes[i, token])
        storage.convolutions[r.layer][target] = inputs[i, token + 1 : token + r.width].detach()
        if states:  # `scan` writes those of a recurrence by channel
            storage.recurrent[r.layer][target] = states[token][i].detach()


def _gated_norm(y: torch.Tensor, gate: torch.Tensor, r: Recurrence) -> torch.Tensor:
    if r.norm is None:
        return y * gate
    y = y if r.norm_first else y * gate
    y = _norm(y.reshape(*y.shape[:-1], r.norm_groups, -1), r.norm).flatten(2)
    return y * gate if r.norm_first else y


def _norm(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    """RMS norm over the last dimension; the weights are of one row or of all rows of a token."""
    if norm is None:
        return x
    weight: torch.Tensor = norm.weight.reshape(-1, x.shape[-1])
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + norm.eps) * weight


def _to_heads(groups: torch.Tensor, r: Recurrence) -> torch.Tensor:
    """[s, n, heads, K] from [s, n, groups, K]."""
    shared = r.heads // r.groups
    return groups.repeat(1, 1, shared, 1) if r.tiled else groups.repeat_interleave(shared, dim=2)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_EPS)


def _host(array: Array) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else np.asarray(array.cpu().numpy())
