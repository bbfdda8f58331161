"""The definition of low-rank changes on numpy arrays."""

from __future__ import annotations

import numpy as np

from bifolio.kernels.interface import Adapter, AdapterUse, Array, LowRank

UP, DOWN = 0, 1  # sites of the products of one expert


def changed(y: Array, x: Array, rows: np.ndarray, parts: tuple[LowRank, ...]) -> Array:
    """y with the changes of one adapter to these rows."""
    if not len(rows) or not parts:
        return y
    y = np.array(y)
    for part in parts:
        change = (x[rows] @ np.float32(part.down).T) @ np.float32(part.up).T
        change = change if part.bias is None else change + part.bias
        y[rows, part.column : part.column + change.shape[1]] += change
    return y


def of_expert(adapters: AdapterUse, tokens: np.ndarray, site: int, number: int) -> AdapterUse:
    """The adapters of the tokens of one expert, whose two products are the sites `UP` and `DOWN`."""
    each = [adapter.experts[site][number] if site in adapter.experts else ((), ()) for adapter in adapters.loaded]
    return AdapterUse(tuple(Adapter({UP: up, DOWN: down}) for up, down in each), adapters.rows[tokens])
