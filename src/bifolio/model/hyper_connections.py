"""Networks whose streams are mixed by the token: layers of attention to compressed entries, and experts."""

from __future__ import annotations

from bifolio.errors import UnsupportedModelError
from bifolio.kernels.interface import Array, Batch, KernelSet, Rotation, Storage
from bifolio.model.compressed_weights import CompressedWeights, CompressorWeights, HyperWeights
from bifolio.model.feed_forward import feed_forward, joined, product
from bifolio.model.weights import LayerWeights, ModelWeights

Stored = Storage | None
Rotations = tuple[Rotation, ...]


def hyper_layers(
    weights: ModelWeights, x: Array, batch: Batch, kernels: KernelSet, storage: Stored, rotations: Rotations
) -> Array:
    """The one stream behind all layers, from the embeddings [t, d]: all streams begin as these."""
    config, end = weights.config, weights.hyper
    if config.hyper is None or end is None:
        raise UnsupportedModelError("a network with mixed streams has weights for their end")
    count, d = config.hyper.count, config.hidden_size
    streams = kernels.join_columns([(x, 0, d)] * count)
    for layer in weights.layers:
        streams = hyper_layer(weights, layer, streams, batch, kernels, storage, rotations)
    return kernels.mix_streams(streams, _mixed(end, streams, kernels), count)


def hyper_layer(
    weights: ModelWeights,
    layer: LayerWeights,
    streams: Array,  # [t, count * d]
    batch: Batch,
    kernels: KernelSet,
    storage: Stored,
    rotations: Rotations,
) -> Array:
    """Attention and experts, each of one stream that is mixed of all, and added to all."""
    config, own = weights.config, layer.compressed
    if own is None or layer.hyper is None or layer.attention_norm is None or layer.mlp_norm is None:
        raise UnsupportedModelError("a layer of mixed streams has norms, and attention to compressed entries")
    around_attention, around_mlp = layer.hyper
    x, mixing, post = _entering(around_attention, streams, kernels)
    y = compressed_attention(layer, own, kernels.norm(x, layer.attention_norm), batch, kernels, storage, rotations)
    streams = kernels.add_to_streams(kernels.mix_streams(streams, mixing, around_attention.mix.count), y, post)
    x, mixing, post = _entering(around_mlp, streams, kernels)
    normed = kernels.norm(x, layer.mlp_norm)
    y = feed_forward(layer, normed, config.activation, config.gated_mlp, batch, kernels, x)
    return kernels.add_to_streams(kernels.mix_streams(streams, mixing, around_mlp.mix.count), y, post)


def _mixed(own: HyperWeights, streams: Array, kernels: KernelSet) -> Array:
    return kernels.stream_weights(kernels.linear(kernels.norm(streams, own.norm), own.logits), own.mix)


def _entering(own: HyperWeights, streams: Array, kernels: KernelSet) -> tuple[Array, Array, Array]:
    """The input of a part of a layer, and the weights by which streams are mixed and its output is added."""
    found, n = _mixed(own, streams, kernels), own.mix.count
    pre, post = (kernels.join_columns([(found, side * n, (side + 1) * n)]) for side in (0, 1))
    mixing = kernels.join_columns([(found, 2 * n, (2 + n) * n)])
    return kernels.mix_streams(streams, pre, n), mixing, post


def compressed_attention(
    layer: LayerWeights,
    own: CompressedWeights,
    x: Array,
    batch: Batch,
    kernels: KernelSet,
    storage: Stored,
    rotations: Rotations,
) -> Array:
    shape, rotation = layer.shape, rotations[layer.rope or 0]
    low_rank = kernels.norm(product(x, own.query_down, batch, kernels), own.query_norm)
    query = kernels.norm(product(low_rank, own.query, batch, kernels), own.head_norm)
    key = kernels.norm(product(x, own.key, batch, kernels), own.key_norm)
    query, key = (kernels.turn_ends(each, rotation, shape.head_dim) for each in (query, key))
    entries = None if own.compressor is None else _entries(own.compressor, x, batch, kernels, storage)
    chosen = None
    if own.index is not None:
        index, shape_of_index = own.index, own.index.shape
        keys = _entries(index.compressor, x, batch, kernels, storage)
        found = product(low_rank, index.query, batch, kernels)
        turned = kernels.turn_ends(found, rotation, shape_of_index.head_dim)
        ranked = kernels.linear(x, index.weights)
        chosen = kernels.choose_entries(
            turned, ranked, keys, index.compressor.entries, shape_of_index, batch, storage
        )  # fmt: skip
    compressor = None if own.compressor is None else own.compressor.entries
    mixed = kernels.attend_entries(query, key, entries, chosen, compressor, shape, batch, storage)
    mixed = kernels.turn_ends(mixed, rotation, shape.head_dim, back=True)
    return joined(kernels.head_linear(mixed, own.groups, 0), layer.output, batch, kernels)


def _entries(own: CompressorWeights, x: Array, batch: Batch, kernels: KernelSet, storage: Stored) -> Array:
    return kernels.compress(product(x, own.rows, batch, kernels), own.entries, batch, storage)
