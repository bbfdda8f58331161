"""Inputs of layers beside the residual stream: a second embedding of each token, with a part for each layer."""

from __future__ import annotations

import math

from bifolio.kernels.interface import Array, KernelSet
from bifolio.model.image_rows import RowLayout
from bifolio.model.stream_weights import GatedInputWeights, LayerInputWeights


def given_columns(own: LayerInputWeights | None, layout: RowLayout) -> int:
    """Columns of second embeddings in the rows of images."""
    return 0 if own is None or layout.input_token is None else own.projection.out_features


def token_inputs(own: LayerInputWeights, token_ids: Array, kernels: KernelSet) -> Array:
    """[t, layers * size]: the second embeddings of tokens."""
    return kernels.embed(own.table, token_ids, own.scale, is_partial=own.is_partial)


def layer_inputs(own: LayerInputWeights, x: Array, second: Array, kernels: KernelSet) -> Array:
    """[t, layers * size]: the inputs of all layers, from the embeddings x of tokens and their second ones."""
    projected = kernels.norm(kernels.linear(x, own.projection), own.norm)
    return kernels.add(projected, second, math.sqrt(0.5))


def gated_inputs(own: GatedInputWeights, x: Array, inputs: Array, activation: str, kernels: KernelSet) -> Array:
    """The inputs of a layer, gated by x, as they are added to the residual stream."""
    size = own.gate.out_features
    both = [(kernels.linear(x, own.gate), 0, size), (inputs, own.start, own.start + size)]
    gated = kernels.act_mul(kernels.join_columns(both), activation)
    return kernels.norm(kernels.linear(gated, own.projection), own.norm)
