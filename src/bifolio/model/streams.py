"""Parallel residual streams (AltUp): [t, streams * d], side by side."""

from __future__ import annotations

from bifolio.config import StreamConfig
from bifolio.kernels.interface import Array, KernelSet
from bifolio.model.stream_weights import LayerStreamWeights, StreamWeights


def spread_streams(own: StreamWeights, x: Array, kernels: KernelSet) -> Array:
    """All streams from the embeddings [t, d]: these, and products with them of the same root mean square."""
    matched = kernels.match_streams(x, kernels.linear(x, own.spread))
    return kernels.join_columns([(x, 0, own.spread.in_features), (matched, 0, own.spread.out_features)])


def merged_streams(own: StreamWeights, x: Array, size: int, kernels: KernelSet) -> Array:
    """[t, d]: the mean of the first stream and of products with the others, of the same root mean square."""
    others = len(own.merge.heads)
    merged = stream(x, 0, size, kernels)
    rest = kernels.join_columns([(x, size, (1 + others) * size)])
    matched = kernels.match_streams(merged, kernels.head_linear(rest, own.merge, 0))
    for number in range(others):
        scale = 1.0 if number + 1 < others else 1.0 / (1 + others)
        merged = kernels.add(merged, stream(matched, number, size, kernels), scale)
    return merged


def predicted_streams(
    config: StreamConfig, own: LayerStreamWeights, x: Array, size: int, kernels: KernelSet
) -> tuple[Array, Array]:
    """The streams that a layer expects after it, and the active one among them."""
    active = stream(x, config.active, size, kernels)
    coefficients = kernels.linear(_modalities(own, active, kernels), own.predict)
    predicted = kernels.mix_streams(x, coefficients, config.count)
    return predicted, stream(predicted, config.active, size, kernels)


def corrected_streams(
    own: LayerStreamWeights, predicted: Array, expected: Array, current: Array, kernels: KernelSet
) -> Array:
    """The predicted streams, each changed in proportion to the difference of the active one from its prediction."""
    coefficients = kernels.linear(_modalities(own, current, kernels), own.correct)
    return kernels.add_to_streams(predicted, kernels.add_to_streams(current, expected, (-1.0,)), coefficients)


def stream(x: Array, number: int, size: int, kernels: KernelSet, factors: Array | None = None) -> Array:
    """One of the streams [t, d], times f32[d] `factors`."""
    return kernels.join_columns([(x, number * size, (number + 1) * size)], factors)


def _modalities(own: LayerStreamWeights, x: Array, kernels: KernelSet) -> Array:
    return kernels.act(kernels.linear(kernels.norm(x, own.router_norm), own.router), "tanh")
