"""The network as a function of (weights, batch, kernels, storage), composed of kernel operations only.

Training and serving run this function on the CPU and on a GPU; families differ in their configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.kernels.interface import Array, Batch, KernelSet, Linear, Rotation, Storage
from bifolio.model.weights import LayerWeights, ModelWeights


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
    for layer in weights.layers:
        normed = x if layer.attention_norm is None else kernels.norm(x, layer.attention_norm)
        attended = PagedAttentionLayer(layer)(normed, batch, kernels, storage, rotations)
        if layer.post_attention_norm is not None:
            attended = kernels.norm(attended, layer.post_attention_norm)
        if layer.mlp_norm is not None:
            x, normed = kernels.add_norm(x, attended, layer.mlp_norm)
        else:
            x = kernels.add(x, attended)
            normed = normed if config.parallel_block else x
        x = kernels.add(x, mlp(layer, normed, config.activation, config.gated_mlp, kernels))
    return x


@dataclass(frozen=True, slots=True, eq=False)  # torch.compile hashes it before its fields are set
class PagedAttentionLayer:
    """The attention part of a transformer layer. The planner reserved all blocks; a layer allocates none."""

    weights: LayerWeights

    def __call__(
        self, x: Array, batch: Batch, kernels: KernelSet, storage: Storage | None, rotations: tuple[Rotation, ...]
    ) -> Array:
        layer = self.weights
        rotation = None if layer.rope is None else rotations[layer.rope]
        qkv = kernels.linear(x, layer.qkv)
        heads = kernels.rope_and_write(qkv, layer.shape, rotation, batch, storage)
        mixed = kernels.attend(heads, layer.shape, batch.segments, storage)
        return joined(mixed, layer.output, kernels)


def mlp(layer: LayerWeights, x: Array, activation: str, gated: bool, kernels: KernelSet) -> Array:
    up = kernels.linear(x, layer.up)
    mixed = kernels.act_mul(up, activation) if gated else kernels.act(up, activation)
    down = joined(mixed, layer.down, kernels)
    return down if layer.post_mlp_norm is None else kernels.norm(down, layer.post_mlp_norm)


def joined(x: Array, linear: Linear, kernels: KernelSet) -> Array:
    """A product whose input is spread over the ranks of tensor parallelism; its result is whole on every rank."""
    shards = linear.shards
    if shards is None:
        return kernels.linear(x, linear)
    if not shards.outputs:
        return kernels.all_reduce(kernels.linear(x, linear))
    return kernels.all_gather(kernels.linear(kernels.all_gather(x, shards.inputs), linear), shards.outputs)


def forward(weights: ModelWeights, batch: Batch, kernels: KernelSet, storage: Storage | None) -> Array:
    """Logits of the tokens in `batch.logit_rows` (None: all tokens): f32[r, vocab]."""
    x = hidden_states(weights, batch, kernels, storage)
    if batch.logit_rows is not None:
        x = kernels.take(x, batch.logit_rows)
    logits = kernels.logits(kernels.norm(x, weights.final_norm), weights.head, weights.config.logit_softcap)
    shards = weights.head.shards
    return logits if shards is None else kernels.all_gather(logits, shards.outputs)
