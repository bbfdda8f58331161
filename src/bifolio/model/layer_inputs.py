"""Inputs of layers beside the residual stream: a second embedding of each token, with a part for each layer."""

from __future__ import annotations

import math

from bifolio.kernels.interface import Array, Batch, KernelSet
from bifolio.model.stream_weights import GatedInputWeights, LayerInputWeights


def layer_inputs(own: LayerInputWeights, x: Array, batch: Batch, kernels: KernelSet) -> Array:
    """[t, layers * size]: the inputs of all layers, from the tokens and from their embeddings x."""
    projected = kernels.norm_groups(kernels.linear(x, own.projection), own.norm)
    embed = kernels.embed_known if own.is_partial else kernels.embed
    return kernels.add_scaled(projected, embed(own.table, batch.token_ids, own.scale), math.sqrt(0.5))


def gated_inputs(own: GatedInputWeights, x: Array, inputs: Array, activation: str, kernels: KernelSet) -> Array:
    """The inputs of a layer, gated by x, as they are added to the residual stream."""
    gated = kernels.act_gate(kernels.linear(x, own.gate), inputs, own.start, activation)
    return kernels.norm(kernels.linear(gated, own.projection), own.norm)
