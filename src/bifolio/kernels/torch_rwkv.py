"""The two recurrences of a layer of RWKV-7 on torch tensors (`kernels.rwkv`): the state runs token by token."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from bifolio.kernels.interface import Array, Recurrence, Storage
from bifolio.kernels.rwkv import LEAST_LENGTH, SLOWEST


def recur_equal(
    rows: torch.Tensor,  # [s, n, in_features]
    r: Recurrence,
    writes: np.ndarray,  # [s, n]
    window: torch.Tensor,  # [s, 1, channels of the window]
    state: torch.Tensor,  # [s, heads, key_size, value_size]
    storage: Storage | None,
) -> torch.Tensor:
    """[s * n, out_features] of sequences of equal lengths."""
    stored: list[torch.Tensor]
    if r.kind == "shift":
        y, stored = _shift(rows, r, window), list(rows.unbind(dim=1))
    else:
        y, stored = _rwkv(rows, r, state)
    result = y.flatten(0, 1)
    if storage is None:
        return result
    for i, token in np.argwhere(writes >= 0).tolist():
        target, kept = int(writes[i, token]), stored[token][i].detach()
        if r.kind == "shift":
            storage.convolutions[r.layer][target, 0, r.column : r.column + r.channels] = kept
        else:
            storage.recurrent[r.layer][target] = kept
    return result


def _shift(rows: torch.Tensor, r: Recurrence, window: torch.Tensor) -> torch.Tensor:
    before = torch.cat([window[:, :, r.column : r.column + r.channels], rows[:, :-1]], dim=1)
    factors: Array = r.factors
    mixed: torch.Tensor = rows[:, :, None] + factors * (before - rows)[:, :, None]
    return mixed.flatten(2)


def _rwkv(rows: torch.Tensor, r: Recurrence, state: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """[s, n, heads * value_size], and the states after each token."""
    keys, inner = r.heads * r.key_size, r.heads * r.value_size
    sizes = [keys, keys, keys, inner, keys, inner, *[inner] * (2 if r.mixes_values else 0)]
    query, w, key, value, a, gate, *mixed = torch.split(rows, sizes, dim=-1)
    if r.mixes_values:
        value = value + torch.sigmoid(mixed[0]) * (mixed[1] - value)
    a = torch.sigmoid(a)
    factors: Array = r.factors
    removed = F.normalize((key * factors[0]).unflatten(-1, (r.heads, -1)), dim=-1, eps=LEAST_LENGTH)
    key = key * (1 + (a - 1) * factors[1])
    decay = torch.exp(SLOWEST * torch.sigmoid(w))
    bonus = (query * key * factors[2]).unflatten(-1, (r.heads, -1)).sum(dim=-1, keepdim=True)
    query, key, decay, a = (part.unflatten(-1, (r.heads, -1))[..., None] for part in (query, key, decay, a))
    removed, value = removed[..., None], value.reshape(*value.shape[:-1], r.heads, -1)

    outputs, states = [], []
    for i in range(rows.shape[1]):
        known = (state * removed[:, i]).sum(dim=2)[:, :, None]
        state = decay[:, i] * state - a[:, i] * removed[:, i] * known + key[:, i] * value[:, i, :, None, :]
        outputs.append((state * query[:, i]).sum(dim=2))
        states.append(state)
    y = _norm(torch.stack(outputs, dim=1), r) + bonus * value
    return y.flatten(2) * gate, states


def _norm(y: torch.Tensor, r: Recurrence) -> torch.Tensor:
    """Layer norm of each head: [s, n, heads, value_size]."""
    if r.norm is None:
        return y
    normed: torch.Tensor = F.layer_norm(y, y.shape[-1:], eps=r.norm.eps) * r.norm.weight.reshape(y.shape[-2:])
    return normed if r.norm.bias is None else normed + r.norm.bias.reshape(y.shape[-2:])
