"""Inputs of layers beside the residual stream: a second embedding of each token, with a part for each layer."""

from __future__ import annotations

import math

from bifolio.kernels.interface import Array, Batch, KernelSet
from bifolio.model.stream_weights import GatedInputWeights, LayerInputWeights


def layer_inputs(own: LayerInputWeights, x: Array, batch: Batch, kernels: KernelSet) -> Array:
    """[t, layers * size]: the inputs of all layers, from the tokens and from their embeddings x."""
    projected = kernels.norm(kernels.linear(x, own.projection), own.norm)
    embedded = kernels.embed(own.table, batch.token_ids, own.scale, is_partial=own.is_partial)
    return kernels.add(projected, embedded, math.sqrt(0.5))


def gated_inputs(own: GatedInputWeights, x: Array, inputs: Array, activation: str, kernels: KernelSet) -> Array:
    """The inputs of a layer, gated by x, as they are added to the residual stream."""
    size = own.gate.out_features
    both = [(kernels.linear(x, own.gate), 0, size), (inputs, own.start, own.start + size)]
    gated = kernels.act_mul(kernels.join_columns(both), activation)
    return kernels.norm(kernels.linear(gated, own.projection), own.norm)
