"""The weights of a network by role: built from files or torch modules, read by kernels.

A matrix is [out, in]: a `QuantizedTensor` (memory-mapped) or a torch tensor. Projections of the same input are parts of
one `Linear`, so that a kernel set can fuse them when it prepares the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.kernels.interface import (
    Array,
    AttentionShape,
    Experts,
    KernelSet,
    Linear,
    Norm,
    Recurrence,
    RoutedExperts,
    Router,
    Shards,
    SharedMlp,
)
from bifolio.model.compressed_weights import CompressedWeights, HyperWeights
from bifolio.model.image_rows import PLAIN_ROWS, RowLayout
from bifolio.model.keyed_weights import KeyedWeights
from bifolio.model.latent_weights import LatentWeights
from bifolio.model.pooler_weights import PoolerWeights
from bifolio.model.rope_frequencies import alibi_slopes, inverse_frequencies
from bifolio.model.rwkv_weights import RwkvWeights
from bifolio.model.shared_weights import Prepare, SharedUse, prepared_once
from bifolio.model.stream_weights import GatedInputWeights, LayerInputWeights, LayerStreamWeights, StreamWeights
from bifolio.model.unit_tensors import UnitWeights
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

OnLoad: TypeAlias = Callable[[int, int], None]  # (layers prepared, layers in all)
NO_LINEAR = Linear((), ())

__all__ = [
    "HeadNorms",
    "LayerWeights",
    "Linear",
    "ModelWeights",
    "MoeWeights",
    "Norm",
    "RecurrentWeights",
    "inverse_frequencies",
    "prepare",
]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """The routed experts of one layer."""

    router: Linear  # [experts, d]
    choice: Router
    experts: Experts
    shared_gate: Linear | None  # [1, d]  its sigmoid multiplies the output of the shared MLP
    shards: Shards | None = None  # of the sum of the experts; None: it is whole on this rank
    scales_inputs: bool = False  # weights multiply the inputs of the experts
    shared_mean: bool = False  # the outputs of the experts and of the shared MLP are averaged
    has_identities: bool = False  # experts behind the last return their input
    is_shortcut: bool = False  # their sum is added behind the next layer
    # Experts beside the MLP of the layer read the residual stream through norms of their own.
    router_norm: Norm | None = None
    input_norm: Norm | None = None
    output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None  # of the MLP beside the experts
    table: Array | None = None  # i32[vocab, top_k]  the experts of a token by its id; None: its logits choose


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms over the query heads and the key heads of all ranks of tensor parallelism, which hold some of them each.

    Rows of q, k and v are gathered from all ranks. `queries` and `keys` are the columns of all heads in them, in order.
    """

    query: Norm  # of all query heads together
    key: Norm
    widths: tuple[int, ...]  # of each rank's q, k and v
    queries: tuple[tuple[int, int], ...]  # [start, stop)
    keys: tuple[tuple[int, int], ...]
    own_queries: tuple[int, int]  # of this rank among those of all heads
    own_keys: tuple[int, int]


@dataclass(frozen=True, slots=True)
class ValueColumns:
    """The values in the output of attention, where they are smaller than keys and cached with zeros behind them."""

    spans: tuple[tuple[int, int], ...]  # [start, stop) of each head
    factors: Array | None  # f32[columns]  None: all are 1

    def prepared(self, kernels: KernelSet) -> ValueColumns:
        return self if self.factors is None else replace(self, factors=kernels.from_host(self.factors))


@dataclass(frozen=True, slots=True)
class SelectiveWeights:
    """The parameters of a selective recurrence that depend on the token, from its convolution."""

    parameters: Linear  # [rank + 2 * key_size, channels]  dt, b and c
    step: Linear  # [channels, rank]
    norms: tuple[Norm, Norm, Norm] | None  # of dt, b and c


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """A recurrence between its two projections."""

    # [recurrence.in_features, d]; keyed: rows of q, k, v, beta and of the low-rank products; rwkv: of queries alone
    input: Linear
    recurrence: Recurrence
    output: Linear  # [d, recurrence.out_features]
    selective: SelectiveWeights | None = None
    keyed: KeyedWeights | None = None
    units: UnitWeights | None = None
    rwkv: RwkvWeights | None = None

    @property
    def inner(self) -> list[Linear]:
        """The products between those of the input and the output, but for those by head."""
        own = [] if self.selective is None else [self.selective.parameters, self.selective.step]
        own = own if self.keyed is None else self.keyed.linears
        return own if self.rwkv is None else self.rwkv.linears

    def matrices(self) -> list[QuantizedTensor | Array]:
        by_head = [] if self.units is None else self.units.linears()
        return [part for linear in (self.input, self.output, *self.inner, *by_head) for part in linear.parts]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One transformer layer: attention, a recurrence, both or neither, and an MLP, experts or neither."""

    shape: AttentionShape  # including the norms of query and key heads
    attention_norm: Norm | None  # of the input of attention and of the recurrence
    qkv: Linear
    output: Linear  # no parts: the layer has no attention
    post_attention_norm: Norm | None
    mlp_norm: Norm | None  # None: no norm, or that of attention if the block is parallel
    up: Linear  # gate and up, if the MLP is gated; no parts: no MLP; beside experts those of the shared MLP
    down: Linear
    post_mlp_norm: Norm | None
    rope: int | None  # index into ModelWeights.inverse_frequencies; None: no rotation
    moe: MoeWeights | None = None
    latent: LatentWeights | None = None  # in place of `qkv`, which has no parts
    recurrent: RecurrentWeights | None = None
    gate: Linear | None = None  # [heads * head_dim, d]  its sigmoid multiplies the output of attention
    values: ValueColumns | None = None  # None: the output of attention is used as it is
    norms: HeadNorms | None = None  # in place of those of `shape`, where ranks share the heads of one norm
    kv_is_shared: bool = False  # later layers read the keys and values of this one
    xielu: tuple[float, float] | None = None  # logarithms of the coefficients of the activation xIELU
    cutoff: float | None = None  # gates of the MLP that many deviations above their mean are kept; None: all
    scale: float = 1.0  # of the residual stream behind the layer
    inputs: GatedInputWeights | None = None
    streams: LayerStreamWeights | None = None
    attention_sub_norm: Norm | None = None  # of the output of attention, before its last projection
    mlp_sub_norm: Norm | None = None  # of the product of gate and up
    mlp_shift: Recurrence | None = None  # a mix of each token with the one before it, in front of the MLP
    shared: SharedUse | None = None  # attention and MLP are a shared block in front of the recurrence
    compressed: CompressedWeights | None = None  # attention to compressed entries, in place of `qkv`
    hyper: tuple[HyperWeights, HyperWeights] | None = None  # around attention and around the MLP

    @property
    def has_attention(self) -> bool:
        return bool(self.output.parts)

    @property
    def has_mlp(self) -> bool:
        return bool(self.up.parts) or self.moe is not None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The whole network."""

    config: ModelConfig
    embedding: QuantizedTensor | Array  # [vocab, d]
    position_embedding: QuantizedTensor | Array | None  # [max_position, d]
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: Linear
    inverse_frequencies: tuple[Array, ...]  # f32[rotary_dim/2] for each rope configuration; f32[2, ...]: two sets
    rope_scales: tuple[float, ...]  # factor on cos and sin for each rope configuration
    embedding_widths: tuple[int, ...] = ()  # columns of the embedding on each rank; empty: this rank has all
    prepared_for: KernelSet | None = None  # the kernel set that owns the arrays; None: as loaded from a file
    layer_inputs: LayerInputWeights | None = None
    streams: StreamWeights | None = None
    image_rows: RowLayout = PLAIN_ROWS  # how a pass takes rows in place of embeddings
    embedding_norm: Norm | None = None
    type_embedding: QuantizedTensor | Array | None = None  # [types, d]
    pooler: PoolerWeights | None = None  # from hidden states to vectors or scores; None: as `PoolingConfig` says alone
    hyper: HyperWeights | None = None  # of the one stream behind all layers
    taps: tuple[int, ...] = ()  # numbers of layers after which a pass gives out its hidden states, in this order

    def tapped(self, taps: tuple[int, ...]) -> ModelWeights:
        """The weights of a network whose passes give out their hidden states after these numbers of layers."""
        if self.streams is not None or self.hyper is not None:
            raise UnsupportedModelError(
                "draft heads cannot read parallel residual streams: draft with n-grams or with a small model"
            )
        return replace(self, taps=taps)

    def matrices(self) -> list[QuantizedTensor | Array]:
        """Every matrix once, in the order of use; tied embeddings are one matrix."""
        found = [self.embedding, *([] if self.position_embedding is None else [self.position_embedding])]
        for layer in self.layers:
            found += [*layer.qkv.parts, *layer.output.parts, *layer.up.parts, *layer.down.parts]
            if layer.latent is not None:
                found += layer.latent.matrices()
            if layer.gate is not None:
                found += layer.gate.parts
            if layer.recurrent is not None:
                found += layer.recurrent.matrices()
            if layer.moe is not None:
                found += [*layer.moe.router.parts, *layer.moe.experts.matrices()]
            found += [] if layer.inputs is None else layer.inputs.matrices()
            found += [] if layer.streams is None else layer.streams.matrices()
            found += [] if layer.shared is None else layer.shared.matrices()
            found += [] if layer.compressed is None else layer.compressed.matrices()
            found += [part for mixed in layer.hyper or () for part in mixed.logits.parts]
        for part in (self.layer_inputs, self.streams, self.pooler):
            found += [] if part is None else part.matrices()
        found += [] if self.hyper is None else self.hyper.logits.parts
        found += [] if self.type_embedding is None else [self.type_embedding]
        return list({id(matrix): matrix for matrix in [*found, *self.head.parts]}.values())

    def formats(self) -> list[QuantFormat]:
        """The format of every matrix loaded from a file."""
        return [matrix.format for matrix in self.matrices() if isinstance(matrix, QuantizedTensor)]


def attention_shape(
    config: ModelConfig,
    layer: int,
    query_norm: Norm | None = None,
    key_norm: Norm | None = None,
    sinks: Array | None = None,
    bias: Array | None = None,
) -> AttentionShape:
    is_rotated = bool(config.ropes) and config.layers[layer].rope is not None
    return AttentionShape(
        layer=_cached_layer(config, layer),
        num_heads=config.num_heads,
        num_kv_heads=config.kv_heads(layer),
        head_dim=config.head_size(layer),
        scale=config.scale,
        window=config.layers[layer].window,
        rope_interleaved=config.rope_interleaved,
        query_norm=query_norm,
        key_norm=key_norm,
        sinks=sinks,
        bidirectional=config.bidirectional,
        bias=bias,
        norm_after_rope=config.qk_norm_after_rope,
        softcap=config.attention_softcap,
        temperature=0.0 if config.temperature_unrotated and is_rotated else config.attention_temperature,
        temperature_period=config.temperature_period,
        temperature_start=int(config.temperature_unrotated),
        in_chunks=config.window_in_chunks and config.layers[layer].window is not None,
        slopes=alibi_slopes(config.num_heads, config.alibi) if config.alibi else None,
        value_norm=_value_norm(config, layer),
        queries_only=config.kv_source(layer) != layer,
        top_k=0 if config.mla is None else config.mla.index_top_k,
        has_entries=config.compressed is not None,
        has_identities=config.moe is not None and config.moe.zero_experts > 0,
    )


def value_columns(config: ModelConfig, layer: int) -> ValueColumns | None:
    size, dim, heads = config.value_dim(layer), config.head_size(layer), config.num_heads
    if (size, config.value_scale) == (dim, 1.0) or config.mla is not None:
        return None
    factors = None if config.value_scale == 1.0 else np.full(heads * size, config.value_scale, np.float32)
    return ValueColumns(tuple((head * dim, head * dim + size) for head in range(heads)), factors)


def _cached_layer(config: ModelConfig, layer: int) -> int:
    """The entries of the cache that a layer writes or reads: all layers of an encoder use the same."""
    if config.bidirectional or not config.layers[layer].attention:
        return 0
    return config.cached_layers.index(config.kv_source(layer))


def _value_norm(config: ModelConfig, layer: int) -> Norm | None:
    if not config.value_norm or config.kv_source(layer) != layer:
        return None
    return Norm(np.ones(config.head_size(layer), np.float32), None, config.norm_eps)


def prepare(weights: ModelWeights, kernels: KernelSet, on_load: OnLoad = lambda done, total: None) -> ModelWeights:
    """Prepare every weight at load: the kernel set repacks it, fuses it, or moves it to its device.

    `on_load` is called with (layers prepared, layers in all).
    """
    if weights.prepared_for is kernels:
        return weights

    shared = prepared_once(kernels) if weights.config.shared_blocks is not None else None

    def prepared(number: int, layer: LayerWeights) -> LayerWeights:
        on_load(number, len(weights.layers))
        return prepare_layer(layer, kernels, shared)

    layers = tuple(prepared(number, layer) for number, layer in enumerate(weights.layers))
    on_load(len(layers), len(layers))
    positions, types, norm = weights.position_embedding, weights.type_embedding, weights.embedding_norm
    return replace(
        weights,
        embedding=kernels.prepare_embedding(weights.embedding),
        position_embedding=None if positions is None else kernels.prepare_embedding(positions),
        layers=layers,
        final_norm=kernels.prepare_norm(weights.final_norm),
        head=kernels.prepare_linear(weights.head) if weights.head.parts else weights.head,
        type_embedding=None if types is None else kernels.prepare_embedding(types),
        embedding_norm=None if norm is None else kernels.prepare_norm(norm),
        pooler=None if weights.pooler is None else weights.pooler.prepared(kernels),
        inverse_frequencies=tuple(kernels.from_host(f) for f in weights.inverse_frequencies),
        layer_inputs=None if weights.layer_inputs is None else weights.layer_inputs.prepared(kernels),
        streams=None if weights.streams is None else weights.streams.prepared(kernels),
        hyper=None if weights.hyper is None else weights.hyper.prepared(kernels),
        prepared_for=kernels,
    )


def prepare_layer(layer: LayerWeights, kernels: KernelSet, shared: Prepare | None = None) -> LayerWeights:
    """One layer; `shared` prepares the matrices of attention and MLP that several layers share."""

    def norm(value: Norm | None) -> Norm | None:
        return None if value is None else kernels.prepare_norm(value)

    def linear(value: Linear) -> Linear:
        if shared is not None:
            return shared(value)
        return kernels.prepare_linear(value) if value.parts else value

    layer = with_shared_expert(layer, kernels)
    norms = layer.norms
    return replace(
        layer,
        norms=None
        if norms is None
        else replace(norms, query=kernels.prepare_norm(norms.query), key=kernels.prepare_norm(norms.key)),
        shape=replace(
            layer.shape,
            query_norm=norm(layer.shape.query_norm),
            key_norm=norm(layer.shape.key_norm),
            value_norm=norm(layer.shape.value_norm),
            sinks=None if layer.shape.sinks is None else kernels.from_host(layer.shape.sinks),
            bias=None if layer.shape.bias is None else kernels.from_host(layer.shape.bias),
            slopes=None if layer.shape.slopes is None else kernels.from_host(layer.shape.slopes),
        ),
        attention_norm=norm(layer.attention_norm),
        qkv=linear(layer.qkv),
        output=linear(layer.output),
        post_attention_norm=norm(layer.post_attention_norm),
        mlp_norm=norm(layer.mlp_norm),
        up=linear(layer.up),
        down=linear(layer.down),
        post_mlp_norm=norm(layer.post_mlp_norm),
        attention_sub_norm=norm(layer.attention_sub_norm),
        mlp_sub_norm=norm(layer.mlp_sub_norm),
        moe=None if layer.moe is None else _prepared_experts(layer.moe, kernels),
        latent=None if layer.latent is None else layer.latent.prepared(kernels),
        recurrent=None if layer.recurrent is None else _prepared_recurrence(layer.recurrent, kernels),
        gate=None if layer.gate is None else linear(layer.gate),
        values=None if layer.values is None else layer.values.prepared(kernels),
        inputs=None if layer.inputs is None else layer.inputs.prepared(kernels),
        streams=None if layer.streams is None else layer.streams.prepared(kernels),
        mlp_shift=None if layer.mlp_shift is None else kernels.prepare_recurrence(layer.mlp_shift),
        shared=None if layer.shared is None else layer.shared.prepared(kernels),
        compressed=None if layer.compressed is None else layer.compressed.prepared(kernels),
        hyper=None if layer.hyper is None else (layer.hyper[0].prepared(kernels), layer.hyper[1].prepared(kernels)),
    )


def with_shared_expert(layer: LayerWeights, kernels: KernelSet) -> LayerWeights:
    """The layer with its shared MLP as one more expert, where both are alike and the kernel set computes them so."""
    moe = layer.moe
    if (
        moe is None
        or not layer.up.parts
        or layer.cutoff is not None
        or moe.scales_inputs
        or moe.table is not None
        or moe.shared_mean
        or moe.has_identities
        or moe.is_shortcut
        or moe.experts.host is not None
    ):
        return layer
    norms = (moe.router_norm, moe.input_norm, moe.output_norm, moe.mlp_output_norm)
    shards = (moe.shards, layer.up.shards, layer.down.shards)
    if any(part is not None for part in (*norms, *shards)):
        return layer
    routed = RoutedExperts(moe.router, moe.choice, moe.experts)
    folded = kernels.fold_shared(routed, SharedMlp(layer.up, layer.down, moe.shared_gate))
    if folded is None:
        return layer
    return replace(layer, up=NO_LINEAR, down=NO_LINEAR, moe=replace(moe, **folded._asdict(), shared_gate=None))


def _prepared_experts(moe: MoeWeights, kernels: KernelSet) -> MoeWeights:
    def vector(value: Array | None) -> Array | None:
        return None if value is None else kernels.from_host(value)

    def norm(value: Norm | None) -> Norm | None:
        return None if value is None else kernels.prepare_norm(value)

    return replace(
        moe,
        router=kernels.prepare_linear(moe.router),
        choice=replace(moe.choice, bias=vector(moe.choice.bias), expert_scales=vector(moe.choice.expert_scales)),
        router_norm=norm(moe.router_norm),
        input_norm=norm(moe.input_norm),
        output_norm=norm(moe.output_norm),
        mlp_output_norm=norm(moe.mlp_output_norm),
        experts=kernels.prepare_experts(moe.experts),
        shared_gate=None if moe.shared_gate is None else kernels.prepare_linear(moe.shared_gate),
        table=None if moe.table is None else kernels.from_host(np.asarray(moe.table)),
    )


def _prepared_recurrence(recurrent: RecurrentWeights, kernels: KernelSet) -> RecurrentWeights:
    own = recurrent.selective
    if own is not None:
        norms = own.norms
        if norms is not None:
            norms = kernels.prepare_norm(norms[0]), kernels.prepare_norm(norms[1]), kernels.prepare_norm(norms[2])
        own = SelectiveWeights(kernels.prepare_linear(own.parameters), kernels.prepare_linear(own.step), norms)
    return RecurrentWeights(
        selective=own,
        keyed=None if recurrent.keyed is None else recurrent.keyed.prepared(kernels),
        units=None if recurrent.units is None else recurrent.units.prepared(kernels),
        rwkv=None if recurrent.rwkv is None else recurrent.rwkv.prepared(kernels),
        input=kernels.prepare_linear(recurrent.input),
        recurrence=kernels.prepare_recurrence(recurrent.recurrence),
        output=kernels.prepare_linear(recurrent.output),
    )
