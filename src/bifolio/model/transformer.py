"""The network as a function of (weights, batch, kernels, storage), composed of kernel operations only.

Training and serving run this function on the CPU and on a GPU; families differ in their configuration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.kernels.interface import NO_SITE, Array, Batch, Heads, KernelSet, Rotation, Storage
from bifolio.long_rope import LONG_ROPE
from bifolio.model.channel_scans import gated_units, selective_scan
from bifolio.model.feed_forward import chosen_experts, exchanged, feed_forward, joined, mlp, product
from bifolio.model.hyper_connections import hyper_layers
from bifolio.model.image_rows import given_rows
from bifolio.model.keyed_weights import KeyedWeights
from bifolio.model.latent_weights import IndexWeights, LatentWeights
from bifolio.model.layer_inputs import gated_inputs, given_columns, layer_inputs, token_inputs
from bifolio.model.rwkv_mixing import Columns, mixed_inputs, mixed_tokens
from bifolio.model.shared_weights import SharedUse, with_low_rank
from bifolio.model.streams import corrected_streams, merged_streams, predicted_streams, spread_streams, stream
from bifolio.model.weights import (
    HeadNorms,
    LayerWeights,
    ModelWeights,
    RecurrentWeights,
)


@dataclass(slots=True, eq=False)
class Carried:
    """The results of layers of a pass that later ones read."""

    heads: dict[int, Heads] = field(default_factory=dict)  # keys and values, by layer of the cache
    chosen: Array | None = None  # i32[t, top_k]  positions that the last indexer chose
    values: Columns | None = None  # of the first layer (RWKV)
    experts: Array | None = None  # [t, d]  added behind the next layer


def rows_width(weights: ModelWeights) -> int:
    """Columns of the rows that a pass can read in place of embeddings (`model.image_rows`)."""
    half = weights.inverse_frequencies[0].shape[-1] if weights.inverse_frequencies else 0
    columns = given_columns(weights.layer_inputs, weights.image_rows)
    return weights.image_rows.width(weights.config.hidden_size, columns, half)


def hidden_states(weights: ModelWeights, batch: Batch, kernels: KernelSet, storage: Storage | None) -> Array:
    """The residual stream after the last layer, before the final norm: [t, d]."""
    config = weights.config
    half = weights.inverse_frequencies[0].shape[-1] if weights.inverse_frequencies else 0
    size, layout = config.hidden_size, weights.image_rows
    own = weights.layer_inputs
    rows = None if batch.given is None else given_rows(layout, size, given_columns(own, layout), half, batch, kernels)
    x = with_positions(weights, embedded(weights, batch, kernels) if rows is None else rows.x, batch, kernels)
    rotations = tuple(
        kernels.rotation(frequencies, scale, batch.positions)
        for frequencies, scale in zip(weights.inverse_frequencies, weights.rope_scales, strict=True)
    )
    if rows is not None and rows.rotation is not None:
        rotations = (rows.rotation, *rotations[1:])
    second = None if rows is None else rows.inputs
    if own is not None and second is None:
        second = token_inputs(own, batch.token_ids, kernels)
    inputs = None if own is None else layer_inputs(own, x, second, kernels)
    carried = Carried()
    if weights.streams is not None:
        x = spread_streams(weights.streams, x, kernels)
        for layer in weights.layers:
            x = stream_layer(weights, layer, x, inputs, batch, kernels, storage, rotations, carried)
        return merged_streams(weights.streams, x, config.hidden_size, kernels)
    if weights.hyper is not None:
        return hyper_layers(weights, x, batch, kernels, storage, rotations)
    if config.residual_norms:
        return residual_normed_layers(weights, x, batch, kernels, storage, rotations)
    _tap(weights, 0, x, batch, kernels)
    embeddings = x
    for number, layer in enumerate(weights.layers, start=1):
        if layer.shared is not None:
            x = layer_with_block(config, layer, layer.shared, x, embeddings, batch, kernels, storage, rotations)
            _tap(weights, number, x, batch, kernels)
            continue
        normed = x if layer.attention_norm is None else kernels.norm(x, layer.attention_norm)
        mixed = token_mixing(layer, normed, batch, kernels, storage, rotations, carried)
        if mixed is not None and config.kept_norms:
            x = kernels.add_to_streams(mixed, normed, (config.kept_norms,))
            normed = x if layer.mlp_norm is None else kernels.norm(x, layer.mlp_norm)
        elif mixed is not None and config.parallel_block:
            normed = normed if layer.mlp_norm is None else kernels.norm(x, layer.mlp_norm)
            x = kernels.add(x, mixed)
        elif mixed is not None and layer.mlp_norm is not None:
            x, normed = kernels.add_norm(x, mixed, layer.mlp_norm)
        elif mixed is not None:
            x = normed = kernels.add(x, mixed)
        elif layer.mlp_norm is not None:
            normed = kernels.norm(x, layer.mlp_norm)
        if layer.has_mlp:
            if layer.mlp_shift is not None:
                normed = kernels.recur(normed, layer.mlp_shift, batch, storage)
            later, carried.experts = carried.experts, None
            if layer.moe is not None and layer.moe.is_shortcut:
                carried.experts = chosen_experts(layer.moe, normed, batch, kernels, x)
            delta = feed_forward(layer, normed, config.activation, config.gated_mlp, batch, kernels, x)
            if config.kept_norms:
                x = kernels.add_to_streams(delta, normed, (config.kept_norms,))
            else:
                x = kernels.add(x, delta, 1.0 if layer.inputs is not None else layer.scale)
            x = x if later is None else kernels.add(x, later)
        if layer.inputs is not None and inputs is not None:
            x = kernels.add(x, gated_inputs(layer.inputs, x, inputs, config.activation, kernels), layer.scale)
        if rows is not None and number <= len(rows.deep):
            x = kernels.add(x, rows.deep[number - 1])
        _tap(weights, number, x, batch, kernels)
    return x


def embedded(weights: ModelWeights, batch: Batch, kernels: KernelSet) -> Array:
    """The embedding of every token: [t, d]."""
    config = weights.config
    scale = config.embedding_scale / config.residual_scale
    x = kernels.embed(weights.embedding, batch.token_ids, scale)
    if batch.adapters is not None:
        x = kernels.adapt_embedding(x, batch.token_ids, scale, batch.adapters)
    return kernels.all_gather(x, weights.embedding_widths) if weights.embedding_widths else x


def with_positions(weights: ModelWeights, x: Array, batch: Batch, kernels: KernelSet) -> Array:
    """The embeddings of tokens with those of their positions and types, and normed, where the network has these."""
    if weights.position_embedding is not None:
        places = batch.positions if weights.type_embedding is None else batch.positions % LONG_ROPE
        x = kernels.add(x, kernels.embed(weights.position_embedding, places, 1.0))
    if weights.type_embedding is not None:
        x = kernels.add(x, kernels.embed(weights.type_embedding, batch.positions // LONG_ROPE, 1.0))
    return x if weights.embedding_norm is None else kernels.norm(x, weights.embedding_norm)


def residual_normed_layers(
    weights: ModelWeights,
    x: Array,
    batch: Batch,
    kernels: KernelSet,
    storage: Storage | None,
    rotations: tuple[Rotation, ...],
) -> Array:
    """The layers of a network that norms its residual stream behind attention and MLP: up to the final norm."""
    config = weights.config
    for layer in weights.layers:
        mixed = PagedAttentionLayer(layer)(x, batch, kernels, storage, rotations)
        if layer.attention_norm is not None:
            _, x = kernels.add_norm(x, mixed, layer.attention_norm)
        delta = mlp(layer, x, config.activation, config.gated_mlp, batch, kernels)
        if layer.mlp_norm is None:
            return kernels.add(x, delta)
        _, x = kernels.add_norm(x, delta, layer.mlp_norm)
    return x


def layer_with_block(
    config: ModelConfig,
    layer: LayerWeights,
    own: SharedUse,
    x: Array,
    embeddings: Array,
    batch: Batch,
    kernels: KernelSet,
    storage: Storage | None,
    rotations: tuple[Rotation, ...],
) -> Array:
    """A recurrent layer whose input alone has the output of a shared block, which reads the embeddings, too."""
    if layer.mlp_norm is None or layer.attention_norm is None or layer.recurrent is None:
        raise UnsupportedModelError("a layer with a shared block has norms and a recurrence")
    d = config.hidden_size
    both = kernels.norm(kernels.join_columns([(x, 0, d), (embeddings, 0, d)]), own.norm)
    mixed = kernels.norm(PagedAttentionLayer(layer)(both, batch, kernels, storage, rotations), layer.mlp_norm)
    delta = mlp(layer, mixed, config.activation, config.gated_mlp, batch, kernels)
    entering = kernels.add(x, kernels.linear(delta, own.output))
    normed = kernels.norm(entering, layer.attention_norm)
    return kernels.add(x, recurrence(layer.recurrent, normed, batch, kernels, storage, Carried()))


def stream_layer(
    weights: ModelWeights,
    layer: LayerWeights,
    x: Array,  # [t, streams * d]
    inputs: Array | None,
    batch: Batch,
    kernels: KernelSet,
    storage: Storage | None,
    rotations: tuple[Rotation, ...],
    carried: Carried,
) -> Array:
    """One layer of a network with parallel streams, which computes the active stream and corrects the others."""
    config, own = weights.config, layer.streams
    if config.streams is None or own is None or layer.attention_norm is None or layer.mlp_norm is None:
        raise UnsupportedModelError("a network with parallel streams has norms and coefficients in every layer")
    predicted, expected = predicted_streams(config.streams, own, x, config.hidden_size, kernels)
    normed = kernels.norm(expected, layer.attention_norm)
    low_rank = kernels.linear(kernels.linear(normed, own.low_rank_down), own.low_rank_up)
    residual = kernels.add(normed, kernels.norm(low_rank, own.low_rank_norm))
    mixed = token_mixing(layer, normed, batch, kernels, storage, rotations, carried)
    current = expected if mixed is None else kernels.add(expected, mixed)
    current = kernels.add(current, residual, math.sqrt(0.5))
    normed = kernels.norm(current, layer.mlp_norm)
    delta = feed_forward(layer, normed, config.activation, config.gated_mlp, batch, kernels, current)
    current = kernels.add(current, delta)
    corrected = corrected_streams(own, predicted, expected, current, kernels)
    if layer.inputs is None or inputs is None:
        return corrected
    gating = stream(corrected, config.streams.active, config.hidden_size, kernels, own.output_scale)
    added = gated_inputs(layer.inputs, gating, inputs, config.activation, kernels)
    return kernels.add_to_streams(corrected, added, (0.0,) + (1.0,) * (config.streams.count - 1))


def token_mixing(
    layer: LayerWeights,
    x: Array,
    batch: Batch,
    kernels: KernelSet,
    storage: Storage | None,
    rotations: tuple[Rotation, ...],
    carried: Carried,
) -> Array | None:
    """The part of a layer that reads other tokens: attention, a recurrence, or the sum of both; None: neither."""
    attend = PagedAttentionLayer(layer)
    mixed = attend(x, batch, kernels, storage, rotations, carried) if layer.has_attention else None
    if layer.recurrent is not None:
        scanned = recurrence(layer.recurrent, x, batch, kernels, storage, carried)
        mixed = scanned if mixed is None else kernels.add(mixed, scanned)
    if mixed is None or layer.post_attention_norm is None:
        return mixed
    return kernels.norm(mixed, layer.post_attention_norm)


def recurrence(
    recurrent: RecurrentWeights,
    x: Array,
    batch: Batch,
    kernels: KernelSet,
    storage: Storage | None,
    carried: Carried,
) -> Array:
    """A recurrence over the tokens of each sequence, from its stored state on."""
    if recurrent.rwkv is not None:
        own, parts = recurrent.rwkv, mixed_inputs(recurrent.rwkv, x, batch, kernels, storage)
        query = product(parts[0], recurrent.input, batch, kernels)
        mixed, carried.values = mixed_tokens(
            own, recurrent.recurrence, query, parts, carried.values, batch, kernels, storage
        )
        return joined(mixed, recurrent.output, batch, kernels)
    inputs = product(x, recurrent.input, batch, kernels)
    if recurrent.selective is not None:
        mixed = selective_scan(recurrent.recurrence, recurrent.selective, inputs, batch, kernels, storage)
        return joined(mixed, recurrent.output, batch, kernels)
    if recurrent.units is not None:
        mixed = gated_units(recurrent.recurrence, recurrent.units, inputs, batch, kernels, storage)
        return joined(mixed, recurrent.output, batch, kernels)
    if recurrent.keyed is not None:
        inputs = keyed_rows(recurrent, recurrent.keyed, inputs, kernels)
    return joined(kernels.recur(inputs, recurrent.recurrence, batch, storage), recurrent.output, batch, kernels)


def keyed_rows(recurrent: RecurrentWeights, own: KeyedWeights, inputs: Array, kernels: KernelSet) -> Array:
    """|q|k|v|z|beta|a| from |q|k|v|beta| and the first halves of the products of low rank that give a and z."""
    r, rank = recurrent.recurrence, own.decay.in_features
    end = r.channels + r.heads  # of beta
    a = kernels.linear(kernels.join_columns([(inputs, end, end + rank)]), own.decay)
    z = kernels.linear(kernels.join_columns([(inputs, end + rank, end + 2 * rank)]), own.gate)
    parts = (inputs, 0, r.channels), (z, 0, r.out_features), (inputs, r.channels, end), (a, 0, r.heads * r.key_size)
    return kernels.join_columns(parts)


def _tap(weights: ModelWeights, num_layers: int, x: Array, batch: Batch, kernels: KernelSet) -> None:
    """Copy the residual stream after `num_layers` layers to the batch, once for each tap of that number."""
    for place, tap in enumerate(weights.taps):
        if tap == num_layers:
            kernels.tap(x, place * weights.config.hidden_size, batch)


@dataclass(frozen=True, slots=True, eq=False)  # torch.compile hashes it before its fields are set
class PagedAttentionLayer:
    """The attention part of a transformer layer. The planner reserved all blocks; a layer allocates none."""

    weights: LayerWeights

    def __call__(
        self,
        x: Array,
        batch: Batch,
        kernels: KernelSet,
        storage: Storage | None,
        rotations: tuple[Rotation, ...],
        carried: Carried | None = None,
    ) -> Array:
        layer, carried = self.weights, Carried() if carried is None else carried
        rotation = None if layer.rope is None else rotations[layer.rope]
        latent = layer.latent
        if latent is None:
            qkv = product(x, layer.qkv, batch, kernels)
            if layer.shared is not None and layer.shared.qkv is not None:
                qkv = with_low_rank(qkv, x, layer.shared.qkv, kernels)
        else:
            compressed = compressed_queries(latent, x, batch, kernels)
            qkv = latent_qkv(latent, x, compressed, batch, kernels)
            if latent.index is not None:
                carried.chosen = chosen_positions(latent.index, x, compressed, batch, kernels, storage, rotation)
        if layer.norms is not None:
            qkv = normed_heads(qkv, layer.norms, kernels)
        heads = kernels.rope_and_write(qkv, layer.shape, rotation, batch, storage)
        if layer.kv_is_shared:
            carried.heads[layer.shape.layer] = heads
        elif layer.shape.queries_only:
            heads = carried.heads[layer.shape.layer]._replace(query=heads.query)
        if layer.shape.top_k:
            mixed = kernels.attend_chosen(heads, carried.chosen, layer.shape, batch.segments, storage)
        else:
            mixed = kernels.attend(heads, layer.shape, batch.segments, storage)
        if latent is not None:
            mixed = kernels.head_linear(mixed, latent.value_up, latent.rope_size)
        if layer.values is not None:
            parts = [(mixed, *span) for span in layer.values.spans]
            mixed = kernels.join_columns(parts, layer.values.factors)
        if layer.gate is not None:
            mixed = kernels.gate(mixed, product(x, layer.gate, batch, kernels))
        if layer.attention_sub_norm is not None:
            mixed = kernels.norm(mixed, layer.attention_sub_norm)
        return joined(mixed, layer.output, batch, kernels)


def normed_heads(qkv: Array, norms: HeadNorms, kernels: KernelSet) -> Array:
    """This rank's q, k and v, with q and k normed over the heads of all ranks: each rank gathers all and norms them."""
    rows = kernels.all_gather(qkv, norms.widths)
    query = kernels.norm(kernels.join_columns([(rows, *span) for span in norms.queries]), norms.query)
    key = kernels.norm(kernels.join_columns([(rows, *span) for span in norms.keys]), norms.key)
    first = sum(stop - start for start, stop in (norms.own_queries, norms.own_keys))
    values = (qkv, first, first + norms.own_keys[1] - norms.own_keys[0])
    return kernels.join_columns([(query, *norms.own_queries), (key, *norms.own_keys), values])


def compressed_queries(latent: LatentWeights, x: Array, batch: Batch, kernels: KernelSet) -> Array:
    """The input of the query projection: `x` itself where that is one matrix."""
    if latent.query_down is None or latent.query_norm is None:
        return x
    return kernels.norm(product(x, latent.query_down, batch, kernels), latent.query_norm)


def latent_qkv(latent: LatentWeights, x: Array, compressed: Array, batch: Batch, kernels: KernelSet) -> Array:
    """Queries that are compared with latents, and the latent itself as the key and the value of one head."""
    query = product(compressed, latent.query, batch, kernels)
    absorbed = kernels.head_linear(query, latent.key_up, 0)
    key = product(x, latent.latent, batch, kernels)
    return kernels.join_latent(query, absorbed, key, latent.latent_norm, latent.rope_size)


def chosen_positions(
    index: IndexWeights,
    x: Array,
    compressed: Array,
    batch: Batch,
    kernels: KernelSet,
    storage: Storage | None,
    rotation: Rotation | None,
) -> Array:
    """The positions that an indexer chooses for each query, i32[t, top_k]; its keys are written to the cache."""
    query = kernels.linear(compressed, index.query)
    key = kernels.norm(kernels.linear(x, index.key), index.key_norm)
    width, size = index.query.out_features, index.shape.head_dim
    rows = kernels.join_columns([(query, 0, width), (key, 0, size), (key, 0, size)])  # the key is its own value
    heads = kernels.rope_and_write(rows, index.shape, rotation, batch, storage)
    return kernels.choose(heads, kernels.linear(x, index.weights), index.shape, batch.segments, storage)


def forward(weights: ModelWeights, batch: Batch, kernels: KernelSet, storage: Storage | None) -> Array:
    """Logits of the tokens in `batch.logit_rows` (None: all tokens): f32[r, vocab]."""
    x = hidden_states(weights, batch, kernels, storage)
    return read_out(weights, x if batch.logit_rows is None else kernels.take(x, batch.logit_rows), kernels, batch)


def read_out(weights: ModelWeights, x: Array, kernels: KernelSet, batch: Batch | None = None) -> Array:
    """Logits f32[r, vocab] of rows of the hidden states; those of `batch` have its adapters."""
    normed, head, softcap = kernels.norm(x, weights.final_norm), weights.head, weights.config.logit_softcap
    is_adapted = batch is not None and batch.adapters is not None and head.site != NO_SITE
    logits = kernels.logits(normed, head, softcap, batch) if is_adapted else kernels.logits(normed, head, softcap)
    return exchanged(logits, weights.head.shards, kernels)
