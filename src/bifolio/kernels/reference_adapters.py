"""The definition of low-rank changes on numpy arrays."""

from __future__ import annotations

import numpy as np

from bifolio.kernels.interface import Adapter, AdapterUse, Array, LowRank
from bifolio.quant.tensor import QuantizedTensor

UP, DOWN = 0, 1  # sites of the products of one expert


def changed(y: Array, x: Array, rows: np.ndarray, parts: tuple[LowRank, ...]) -> Array:
    """y with the changes of one adapter to these rows."""
    if not len(rows) or not parts:
        return y
    y = np.array(y)
    for part in parts:
        if part.down is None:
            own = np.asarray(_tensor(part.up).matmul(x[rows]))
            y[rows] = own if part.bias is None else own + part.bias
            continue
        change = (x[rows] @ np.float32(part.down).T) @ np.float32(part.up).T
        change = change if part.bias is None else change + part.bias
        y[rows, part.column : part.column + change.shape[1]] += change
    return y


def changed_embedding(x: Array, ids: np.ndarray, scale: float, adapters: AdapterUse) -> Array:
    """x with the changes of the table by the adapters of the tokens."""
    x = np.array(x)
    for number, adapter in enumerate(adapters.loaded):
        rows = np.flatnonzero(adapters.rows == number)
        for part in adapter.embedding if len(rows) else ():
            own = _tensor(part.up).dequantize_rows(ids[rows])
            x[rows] = scale * own if part.down is None else x[rows] + scale * (own @ np.float32(part.down))
    return x


def _tensor(value: Array) -> QuantizedTensor:
    return value if isinstance(value, QuantizedTensor) else QuantizedTensor.from_array(value)


def of_expert(adapters: AdapterUse, tokens: np.ndarray, site: int, number: int) -> AdapterUse:
    """The adapters of the tokens of one expert, whose two products are the sites `UP` and `DOWN`."""
    each = [adapter.experts[site][number] if site in adapter.experts else ((), ()) for adapter in adapters.loaded]
    return AdapterUse(tuple(Adapter({UP: up, DOWN: down}) for up, down in each), adapters.rows[tokens])
