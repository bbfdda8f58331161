"""Parallel residual streams (AltUp): [t, streams * d], side by side."""

from __future__ import annotations

from bifolio.config import StreamConfig
from bifolio.kernels.interface import Array, KernelSet
from bifolio.model.stream_weights import LayerStreamWeights, StreamWeights


def spread_streams(own: StreamWeights, x: Array, kernels: KernelSet) -> Array:
    """All streams from the embeddings [t, d]."""
    return kernels.spread_streams(x, kernels.linear(x, own.spread))


def merged_streams(own: StreamWeights, x: Array, size: int, kernels: KernelSet) -> Array:
    """[t, d]: one stream behind the last layer."""
    rest = kernels.columns(x, size, len(own.merge.heads) * size)
    return kernels.merge_streams(kernels.columns(x, 0, size), kernels.head_linear(rest, own.merge, 0))


def predicted_streams(
    config: StreamConfig, own: LayerStreamWeights, x: Array, size: int, kernels: KernelSet
) -> tuple[Array, Array]:
    """The streams that a layer expects behind it, and the active one among them."""
    active = kernels.columns(x, config.active * size, size)
    coefficients = kernels.linear(_modalities(own, active, kernels), own.predict)
    predicted = kernels.mix_streams(x, coefficients, config.count)
    return predicted, kernels.columns(predicted, config.active * size, size)


def stream_output(
    config: StreamConfig, own: LayerStreamWeights, predicted: Array, current: Array, size: int, kernels: KernelSet
) -> tuple[Array, Array]:
    """The streams corrected by the active one, and the active one as it gates the inputs of the layer."""
    coefficients = kernels.linear(_modalities(own, current, kernels), own.correct)
    corrected = kernels.correct_streams(predicted, current, coefficients, config.active)
    return corrected, kernels.columns(corrected, config.active * size, size, own.output_scale)


def _modalities(own: LayerStreamWeights, x: Array, kernels: KernelSet) -> Array:
    return kernels.act(kernels.linear(kernels.norm(x, own.router_norm), own.router), "tanh")
