"""Arithmetic and memory traffic of a pass, from the shapes of the weights and of the batch, by part of the network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bifolio.kernels.interface import AttentionSegment, Batch, Experts, KernelSet, Linear, Recurrence
from bifolio.kernels.storage import KVStorage
from bifolio.model.weights import LayerWeights, ModelWeights
from bifolio.quant.convert import converted_bytes, target_format
from bifolio.quant.tensor import QuantizedTensor


@dataclass(slots=True)
class PartTotals:
    """Totals of one part of a step."""

    seconds: float = 0.0
    flops: float = 0.0  # multiplications and additions of matrix products and attention
    num_bytes: float = 0.0  # minimum memory traffic: weights once per pass, keys and values
    integer_flops: float = 0.0  # part of `flops`: products with quantised weights, computed in integers

    def add(self, flops: float, num_bytes: float, integer_flops: float = 0.0) -> None:
        self.flops += flops
        self.num_bytes += num_bytes
        self.integer_flops += integer_flops


Totals = defaultdict[str, PartTotals]  # by part


class PassWork:
    """The work of one model on a kernel set; the sizes of its matrices are read once."""

    def __init__(self, weights: ModelWeights, kernels: KernelSet, storage: KVStorage) -> None:
        self._weights, self._kernels = weights, kernels
        self._entry_bytes = storage.keys[0].dtype.itemsize if storage.keys else 4
        self._products = [(linear, part, *self._sizes(linear)) for linear, part in every_product(weights)]
        self._head = weights.head, *self._sizes(weights.head)

    def _sizes(self, linear: Linear) -> tuple[float, float]:
        """(bytes, share of its products that are of integers)"""
        share = quantised_share(linear, self._kernels) if self._kernels.activation_planes else 0.0
        return linear_bytes(linear, self._kernels), share

    def add_to(self, totals: Totals, batch: Batch) -> None:
        """Add the work of one pass."""
        tokens = batch.num_tokens
        rows = tokens if batch.logit_rows is None else len(batch.logit_rows)
        tables = 1 if self._weights.position_embedding is None else 2
        totals["embedding"].add(0.0, 4.0 * tables * tokens * self._weights.config.hidden_size)
        for linear, part, num_bytes, share in self._products:
            flops = 2.0 * tokens * linear.in_features * linear.out_features
            totals[part].add(flops, num_bytes, flops * share)
        head, num_bytes, share = self._head
        flops = 2.0 * rows * head.in_features * head.out_features
        totals["logits"].add(flops, num_bytes, flops * share)
        for layer in self._weights.layers:
            self._add_layer(totals, layer, batch)

    def _add_layer(self, totals: Totals, layer: LayerWeights, batch: Batch) -> None:
        """Attention, recurrence and experts of a layer."""
        shape = layer.shape
        for segment in batch.segments if layer.has_attention else ():
            pairs, context = seen_pairs(segment, shape.window or shape.top_k or None)
            flops = 4.0 * shape.num_heads * shape.head_dim * pairs  # one product for scores, one for values
            totals["attention"].add(flops, 2.0 * shape.num_kv_heads * shape.head_dim * self._entry_bytes * context)
        if layer.recurrent is not None:
            totals["attention"].add(*recurrence_work(layer.recurrent.recurrence, batch))
        if layer.moe is not None:
            totals["MLP"].add(*self._expert_work(layer.moe.experts, layer.moe.choice.top_k, batch.num_tokens))

    def _expert_work(self, experts: Experts, top_k: int, tokens: int) -> tuple[float, float]:
        """The products of the chosen experts, and the bytes of those that tokens choose if all are chosen as often."""
        up, down = experts.up[0], experts.down[0]
        size = up.in_features * up.out_features + down.in_features * down.out_features
        read = 1.0 - (1.0 - top_k / len(experts.up)) ** tokens
        num_bytes = sum(converted_bytes(matrix, self._kernels.formats) for matrix in experts.matrices())
        return 2.0 * tokens * top_k * size, read * num_bytes


def recurrence_work(recurrence: Recurrence, batch: Batch) -> tuple[float, float]:
    """The update of each state and its two products for each token; a state is read and written once."""
    size = recurrence.heads * recurrence.key_size * recurrence.value_size
    state = size + (recurrence.width - 1) * recurrence.channels
    sequences = sum(segment.num_sequences for segment in batch.segments)
    flops = batch.num_tokens * (7.0 * size + 2.0 * recurrence.width * recurrence.channels)
    return flops, 8.0 * sequences * state


def every_product(weights: ModelWeights) -> Iterator[tuple[Linear, str]]:
    """The products of the network by head (`head_linear`) too, the output head excepted."""
    yield from products_of(weights)
    heads = [] if weights.streams is None else [weights.streams.merge]
    heads += [each for layer in weights.layers if layer.latent for each in (layer.latent.key_up, layer.latent.value_up)]
    yield from ((linear, "projections") for each in heads for linear in each.heads)
    for layer in weights.layers:
        units = None if layer.recurrent is None else layer.recurrent.units
        yield from ((linear, "projections") for linear in ([] if units is None else units.linears()))


def products_of(weights: ModelWeights) -> Iterator[tuple[Linear, str]]:
    """The products of the network, the head excepted, and the part of a step that each belongs to."""
    if weights.layer_inputs is not None:
        yield weights.layer_inputs.projection, "projections"
    if weights.streams is not None:
        yield weights.streams.spread, "projections"
    for layer in weights.layers:
        found: list[Linear | None] = [layer.qkv, layer.output, layer.gate]
        if layer.latent is not None:
            found += [layer.latent.query_down, layer.latent.query, layer.latent.latent]
            found += [] if layer.latent.index is None else layer.latent.index.linears()
        if layer.recurrent is not None:
            found += [layer.recurrent.input, layer.recurrent.output, *layer.recurrent.inner]
        if layer.inputs is not None:
            found += [layer.inputs.gate, layer.inputs.projection]
        if layer.streams is not None:
            found += layer.streams.linears()
        found += [] if layer.shared is None else layer.shared.linears
        yield from ((linear, "projections") for linear in found if linear is not None and linear.parts)
        found = [layer.up, layer.down]
        if layer.moe is not None:
            found += [layer.moe.router, layer.moe.shared_gate]
        yield from ((linear, "MLP") for linear in found if linear is not None and linear.parts)


def linear_bytes(linear: Linear, kernels: KernelSet) -> int:
    """Bytes of the matrices in the formats that the kernels multiply by."""
    return sum(converted_bytes(part, kernels.formats) for part in linear.parts)


def quantised_share(linear: Linear, kernels: KernelSet) -> float:
    """Share of a linear's outputs whose weights the kernels hold in a quantised format."""
    quantised = [
        part.shape[0]
        for part in linear.parts
        if isinstance(part, QuantizedTensor) and target_format(part.format, kernels.formats).is_quantized
    ]
    return sum(quantised) / linear.out_features


def seen_pairs(segment: AttentionSegment, window: int | None) -> tuple[int, int]:
    """(query, key) pairs of attention, and the cached tokens it reads, over all sequences of a segment."""
    lengths = np.diff(np.asarray(segment.query_starts)).astype(np.int64)
    contexts = np.asarray(segment.context_lens).astype(np.int64)
    first = contexts - lengths + 1  # tokens visible to the first query
    if window is None:
        return int(((first + contexts) * lengths // 2).sum()), int(contexts.sum())
    pairs = sum(int(np.minimum(np.arange(a, b + 1), window).sum()) for a, b in zip(first, contexts, strict=True))
    return pairs, int(np.minimum(contexts, window + lengths - 1).sum())
