"""A base with an adapter added to its weights: a model of its own, which needs no adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.kernels.interface import Adapter, Experts, Linear, LowRank
from bifolio.model.adapters.adapter import AdapterWeights
from bifolio.model.adapters.sites import EXPERTS, changed_products, head_site, site_of
from bifolio.model.loaded import LoadedModel
from bifolio.model.weights import LayerWeights
from bifolio.quant.tensor import QuantizedTensor


def merged(model: LoadedModel, adapter: AdapterWeights) -> LoadedModel:
    """The model with the changes in its weights: changed matrices are dense, all others stay as they are."""
    weights, changes = model.weights, adapter.weights
    layers = tuple(_merged_layer(layer, number, changes) for number, layer in enumerate(weights.layers))
    head_changes = changes.products.get(head_site(len(layers)), ())
    pooler = None if weights.pooler is None else weights.pooler.changed(adapter.saved.pooler or {})
    weights = replace(
        weights,
        layers=layers,
        head=merged_linear(weights.head, head_changes),
        embedding=_merged_table(weights.embedding, changes.embedding),
        pooler=pooler,
    )
    if head_changes or changes.embedding:
        weights = replace(weights, config=replace(weights.config, tie_embeddings=False))
        model = replace(model, config=replace(model.config, tie_embeddings=False))
    return replace(model, weights=weights, digest_source=None)


def _merged_table(table: Any, changes: tuple[LowRank, ...]) -> Any:
    if not changes:
        return table
    return merged_linear(Linear((table,), (None,)), changes).parts[0]


def _merged_layer(layer: LayerWeights, number: int, adapter: Adapter) -> LayerWeights:
    def change(role: str, linear: Linear) -> Linear:
        return merged_linear(linear, adapter.products.get(site_of(number, role), ()))

    def change_experts(experts: Experts) -> Experts:
        every = adapter.experts.get(site_of(number, EXPERTS))
        if every is None:
            return experts
        return replace(
            experts,
            up=tuple(merged_linear(up, own.up) for up, own in zip(experts.up, every, strict=True)),
            down=tuple(merged_linear(down, own.down) for down, own in zip(experts.down, every, strict=True)),
        )

    return changed_products(layer, change, change_experts)


def merged_linear(linear: Linear, changes: tuple[LowRank, ...]) -> Linear:
    """The product with W + up down in place of each matrix W that is changed, and with the biases of the changes."""
    if not changes:
        return linear
    parts, biases, start = list(linear.parts), list(linear.biases), 0
    for index, part in enumerate(linear.parts):
        stop = start + int(part.shape[0])
        for each in changes:
            if each.down is None:
                parts[index], biases[index] = each.up, each.bias
                continue
            rows = slice(max(each.column, start) - start, min(each.column + each.up.shape[0], stop) - start)
            if rows.start >= rows.stop:
                continue
            own = slice(rows.start + start - each.column, rows.stop + start - each.column)
            weight = _values(parts[index])
            weight[rows] += np.asarray(each.up[own], np.float32) @ np.asarray(each.down, np.float32)
            parts[index] = QuantizedTensor.from_array(weight)
            if each.bias is not None:
                bias = np.zeros(len(weight), np.float32) if biases[index] is None else np.array(biases[index])
                bias[rows] += each.bias[own]
                biases[index] = bias
        start = stop
    return replace(linear, parts=tuple(parts), biases=tuple(biases), prepared=None)


def _values(part: Any) -> np.ndarray:
    return np.array(part.dequantize() if isinstance(part, QuantizedTensor) else part, np.float32)
