"""The order of the heads of recurrent layers, which differs between folders and GGUF files.

    grouped   heads 0, 1, ... of group 0, then those of group 1        folders
    tiled     head 0 of groups 0, 1, ..., then head 1 of each          some GGUF files

Files are read in their own order (`Recurrence.tiled`): columns of quantised matrices cannot be reordered.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.config import ModelConfig, RecurrentConfig
from bifolio.kernels.interface import Linear
from bifolio.model.weights import ModelWeights, RecurrentWeights
from bifolio.quant.tensor import QuantizedTensor

Rows = NDArray[np.int64]


def with_head_order(weights: ModelWeights, *, tiled: bool) -> ModelWeights:
    """The same network with the heads of its recurrent layers in another order."""
    own = weights.config.recurrent
    if own is None or own.kind != "delta" or own.tiled == tiled:
        return weights
    layers = tuple(
        layer if layer.recurrent is None else replace(layer, recurrent=_reordered(layer.recurrent, own, tiled))
        for layer in weights.layers
    )
    config: ModelConfig = replace(weights.config, recurrent=replace(own, tiled=tiled))
    return replace(weights, config=config, layers=layers)


def _reordered(weights: RecurrentWeights, own: RecurrentConfig, tiled: bool) -> RecurrentWeights:
    each = own.heads // own.groups
    shape = (own.groups, each) if tiled else (each, own.groups)
    heads = np.arange(own.heads).reshape(shape).T.reshape(-1)
    values = (heads[:, None] * own.value_size + np.arange(own.value_size)).reshape(-1)
    keys = 2 * own.groups * own.key_size
    channels = np.concatenate([np.arange(keys), keys + values])
    start = keys + own.inner_size  # of z, then beta and a
    scalars = start + own.inner_size
    rows = np.concatenate([channels, start + values, scalars + heads, scalars + own.heads + heads])
    old = weights.recurrence
    return RecurrentWeights(
        _rows(weights.input, rows),
        replace(
            old,
            conv_weight=old.conv_weight[channels],
            conv_bias=_taken(old.conv_bias, channels),
            decay=_taken(old.decay, heads),
            bias=_taken(old.bias, heads),
            tiled=tiled,
        ),
        Linear(tuple(_columns(part, values) for part in weights.output.parts), weights.output.biases),
    )


def _taken(vector: Any, order: Rows) -> Any:
    return None if vector is None else vector[order]


def _rows(linear: Linear, order: Rows) -> Linear:
    """The rows of each part in the new order, which moves no row to another part."""
    parts, biases, before = [], [], 0
    for part, bias in zip(linear.parts, linear.biases, strict=True):
        count = int(part.shape[0])
        own = order[before : before + count] - before
        parts.append(part.select_rows(own) if isinstance(part, QuantizedTensor) else part[own])
        biases.append(_taken(bias, own))
        before += count
    return Linear(tuple(parts), tuple(biases))


def _columns(matrix: Any, order: Rows) -> QuantizedTensor:
    values = matrix.dequantize() if isinstance(matrix, QuantizedTensor) else np.asarray(matrix)
    return QuantizedTensor.from_array(values[:, order])
