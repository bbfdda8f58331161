"""The network as a function of (weights, batch, kernels, storage), composed of kernel operations only.

Training and serving run this function on the CPU and on a GPU; families differ in their configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.kernels.interface import Array, Batch, KernelSet, Linear, Rotation, Shards, Storage
from bifolio.model.weights import LatentWeights, LayerWeights, ModelWeights, MoeWeights, RecurrentWeights


def hidden_states(weights: ModelWeights, batch: Batch, kernels: KernelSet, storage: Storage | None) -> Array:
    """The residual stream after the last layer, before the final norm: [t, d]."""
    config = weights.config
    x = kernels.embed(weights.embedding, batch.token_ids, config.embedding_scale / config.residual_scale)
    if weights.embedding_widths:
        x = kernels.all_gather(x, weights.embedding_widths)
    if weights.position_embedding is not None:
        x = kernels.add(x, kernels.embed(weights.position_embedding, batch.positions, 1.0))
    rotations = tuple(
        kernels.rotation(frequencies, scale, batch.positions)
        for frequencies, scale in zip(weights.inverse_frequencies, weights.rope_scales, strict=True)
    )
    _tap(weights, 0, x, batch, kernels)
    for number, layer in enumerate(weights.layers, start=1):
        normed = x if layer.attention_norm is None else kernels.norm(x, layer.attention_norm)
        mixed = token_mixing(layer, normed, batch, kernels, storage, rotations)
        if mixed is not None and layer.mlp_norm is not None:
            x, normed = kernels.add_norm(x, mixed, layer.mlp_norm)
        elif mixed is not None:
            x = kernels.add(x, mixed)
            normed = normed if config.parallel_block else x
        elif layer.mlp_norm is not None:
            normed = kernels.norm(x, layer.mlp_norm)
        if layer.has_mlp:
            x = kernels.add(x, feed_forward(layer, normed, config.activation, config.gated_mlp, kernels))
        _tap(weights, number, x, batch, kernels)
    return x


def token_mixing(
    layer: LayerWeights,
    x: Array,
    batch: Batch,
    kernels: KernelSet,
    storage: Storage | None,
    rotations: tuple[Rotation, ...],
) -> Array | None:
    """The part of a layer that reads other tokens: attention, a recurrence, or the sum of both; None: neither."""
    mixed = PagedAttentionLayer(layer)(x, batch, kernels, storage, rotations) if layer.has_attention else None
    if layer.recurrent is not None:
        scanned = recurrence(layer.recurrent, x, batch, kernels, storage)
        mixed = scanned if mixed is None else kernels.add(mixed, scanned)
    if mixed is None or layer.post_attention_norm is None:
        return mixed
    return kernels.norm(mixed, layer.post_attention_norm)


def recurrence(
    recurrent: RecurrentWeights, x: Array, batch: Batch, kernels: KernelSet, storage: Storage | None
) -> Array:
    """A recurrence over the tokens of each sequence, from its stored state on."""
    inputs = kernels.linear(x, recurrent.input)
    return kernels.linear(kernels.recur(inputs, recurrent.recurrence, batch, storage), recurrent.output)


def _tap(weights: ModelWeights, num_layers: int, x: Array, batch: Batch, kernels: KernelSet) -> None:
    """Give out the residual stream after so many layers, where the weights name them, once or several times."""
    for place, tap in enumerate(weights.taps):
        if tap == num_layers:
            kernels.tap(x, place * weights.config.hidden_size, batch)


@dataclass(frozen=True, slots=True, eq=False)  # torch.compile hashes it before its fields are set
class PagedAttentionLayer:
    """The attention part of a transformer layer. The planner reserved all blocks; a layer allocates none."""

    weights: LayerWeights

    def __call__(
        self, x: Array, batch: Batch, kernels: KernelSet, storage: Storage | None, rotations: tuple[Rotation, ...]
    ) -> Array:
        layer = self.weights
        rotation = None if layer.rope is None else rotations[layer.rope]
        latent = layer.latent
        qkv = kernels.linear(x, layer.qkv) if latent is None else latent_qkv(latent, x, kernels)
        heads = kernels.rope_and_write(qkv, layer.shape, rotation, batch, storage)
        mixed = kernels.attend(heads, layer.shape, batch.segments, storage)
        if latent is not None:
            mixed = kernels.head_linear(mixed, latent.value_up, latent.rope_size)
        if layer.gate is not None:
            mixed = kernels.gate(mixed, kernels.linear(x, layer.gate))
        return joined(mixed, layer.output, kernels)


def latent_qkv(latent: LatentWeights, x: Array, kernels: KernelSet) -> Array:
    """Queries that are compared with latents, and the latent itself as the key and the value of one head."""
    inputs = x
    if latent.query_down is not None and latent.query_norm is not None:
        inputs = kernels.norm(kernels.linear(x, latent.query_down), latent.query_norm)
    query = kernels.linear(inputs, latent.query)
    absorbed = kernels.head_linear(query, latent.key_up, 0)
    return kernels.join_latent(query, absorbed, kernels.linear(x, latent.latent), latent.latent_norm, latent.rope_size)


def feed_forward(layer: LayerWeights, x: Array, activation: str, gated: bool, kernels: KernelSet) -> Array:
    """The part of a layer behind attention: a plain MLP, or a mixture of experts."""
    if layer.moe is None:
        out = mlp(layer, x, activation, gated, kernels)
    else:
        out = mixture(layer, layer.moe, x, activation, gated, kernels)
    return out if layer.post_mlp_norm is None else kernels.norm(out, layer.post_mlp_norm)


def mlp(layer: LayerWeights, x: Array, activation: str, gated: bool, kernels: KernelSet) -> Array:
    up = kernels.linear(x, layer.up)
    mixed = kernels.act_mul(up, activation) if gated else kernels.act(up, activation)
    return joined(mixed, layer.down, kernels)


def mixture(layer: LayerWeights, moe: MoeWeights, x: Array, activation: str, gated: bool, kernels: KernelSet) -> Array:
    """The experts that each token chooses, and the shared MLP if there is one."""
    routing = kernels.route(kernels.linear(x, moe.router), moe.choice)
    mixed = exchanged(kernels.mix_experts(x, routing, moe.experts), moe.shards, kernels)
    if not layer.up.parts:
        return mixed
    shared = mlp(layer, x, activation, gated, kernels)
    if moe.shared_gate is not None:
        shared = kernels.gate(shared, kernels.linear(x, moe.shared_gate))
    return kernels.add(mixed, shared)


def joined(x: Array, linear: Linear, kernels: KernelSet) -> Array:
    """A product whose input is spread over the ranks of tensor parallelism; its result is whole on every rank."""
    shards = linear.shards
    if shards is not None and shards.inputs:
        x = kernels.all_gather(x, shards.inputs)
    return exchanged(kernels.linear(x, linear), shards, kernels)


def exchanged(x: Array, shards: Shards | None, kernels: KernelSet) -> Array:
    """The results of all ranks, side by side or added."""
    if shards is None:
        return x
    return kernels.all_gather(x, shards.outputs) if shards.outputs else kernels.all_reduce(x)


def forward(weights: ModelWeights, batch: Batch, kernels: KernelSet, storage: Storage | None) -> Array:
    """Logits of the tokens in `batch.logit_rows` (None: all tokens): f32[r, vocab]."""
    x = hidden_states(weights, batch, kernels, storage)
    if batch.logit_rows is not None:
        x = kernels.take(x, batch.logit_rows)
    logits = kernels.logits(kernels.norm(x, weights.final_norm), weights.head, weights.config.logit_softcap)
    return exchanged(logits, weights.head.shards, kernels)
