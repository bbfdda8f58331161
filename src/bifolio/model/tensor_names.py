"""Tensor names by role, and the function that assembles the weights.

The tables here are those of Llama, which most families share; other families define theirs in `model/families/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bifolio.config import ModelConfig
from bifolio.kernels.interface import Array, Experts, Linear, Norm, Router
from bifolio.model.compressed_tensors import (
    CompressedNames,
    assemble_compressed,
    assemble_hyper,
    assemble_layer_hyper,
    read_table,
)
from bifolio.model.distance_bias import distance_bias
from bifolio.model.fetch import Fetch, FetchVector, fetched_once, stacked_matrices
from bifolio.model.latent_names import GGUF_LATENT, HF_LATENT, LatentNames
from bifolio.model.latent_tensors import assemble_latent
from bifolio.model.norm_tensors import stored_norm
from bifolio.model.recurrent_tensors import RecurrentNames, assemble_recurrence
from bifolio.model.rwkv_tensors import assemble_mlp_shift
from bifolio.model.shared_tensors import SharedNames, assemble_shared_use
from bifolio.model.stream_tensors import (
    LayerInputNames,
    StreamNames,
    assemble_gated_inputs,
    assemble_layer_inputs,
    assemble_layer_streams,
    assemble_streams,
)
from bifolio.model.weights import (
    NO_LINEAR,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    attention_shape,
    inverse_frequencies,
    value_columns,
)
from bifolio.model.xielu import read_xielu
from bifolio.quant.tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names without `.weight` and `.bias`; those of a layer are prefixed by `layer` with its number."""

    embedding: str
    layer: str
    attention_norm: str
    qkv: tuple[str, ...]  # three names, or one if the file fuses them
    output: str
    mlp_norm: str
    up: tuple[str, ...]  # gate and up, or one name
    down: str
    final_norm: str
    head: str
    positions: str = ""
    types: str = ""
    embedding_norm: str = ""
    distance_bias: str = ""
    xielu: tuple[str, str] = ("", "")  # with their suffixes
    query_norm: str = ""
    key_norm: str = ""
    post_attention_norm: str = ""
    post_mlp_norm: str = ""
    attention_sub_norm: str = ""
    mlp_sub_norm: str = ""
    transposed: bool = False  # matrices of layers are stored as [in, out]
    router: str = ""
    selection_bias: str = ""  # with its suffix
    expert_up: tuple[str, ...] = ()  # with {}: a matrix for each expert; without: one tensor [experts, out, in]
    expert_down: str = ""
    shared_up: tuple[str, ...] = ()
    shared_down: str = ""
    shared_gate: str = ""
    sinks: str = ""  # with its suffix
    latent: LatentNames | None = None
    recurrent: RecurrentNames | None = None
    gate: str = ""  # of the output of attention
    layer_scale: str = ""  # with its suffix
    layer_inputs: LayerInputNames | None = None
    streams: StreamNames | None = None
    shared: SharedNames | None = None
    compressed: CompressedNames | None = None
    router_scale: str = ""  # with its suffix, as the next
    expert_scales: str = ""
    expert_norm: str = ""
    post_expert_norm: str = ""
    post_shared_norm: str = ""

    def is_transposed(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether the file stores the tensor transposed."""
        return self.transposed and len(shape) == 2 and name.startswith(self.layer.split("{}")[0])


HF_LLAMA = TensorNames(
    embedding="model.embed_tokens",
    layer="model.layers.{}.",
    attention_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    mlp_norm="post_attention_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    final_norm="model.norm",
    head="lm_head",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    attention_sub_norm="self_attn.attn_sub_norm",
    mlp_sub_norm="mlp.ffn_sub_norm",
    router="mlp.gate",
    selection_bias="mlp.gate.e_score_correction_bias",
    expert_up=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    expert_down="mlp.experts.{}.down_proj",
    shared_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
    shared_gate="mlp.shared_expert_gate",
    sinks="self_attn.sinks",
    latent=HF_LATENT,
)
GGUF_LLAMA = TensorNames(
    embedding="token_embd",
    layer="blk.{}.",
    attention_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    output="attn_output",
    mlp_norm="ffn_norm",
    up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    final_norm="output_norm",
    head="output",
    query_norm="attn_q_norm",
    key_norm="attn_k_norm",
    post_attention_norm="post_attention_norm",
    post_mlp_norm="post_ffw_norm",
    attention_sub_norm="attn_sub_norm",
    mlp_sub_norm="ffn_sub_norm",
    router="ffn_gate_inp",
    selection_bias="exp_probs_b.bias",
    expert_up=("ffn_gate_exps", "ffn_up_exps"),
    expert_down="ffn_down_exps",
    shared_up=("ffn_gate_shexp", "ffn_up_shexp"),
    shared_down="ffn_down_shexp",
    shared_gate="ffn_gate_inp_shexp",
    sinks="attn_sinks.weight",
    latent=GGUF_LATENT,
)


def assemble(config: ModelConfig, names: TensorNames, fetch: Fetch, vector: FetchVector) -> ModelWeights:
    """Build the weights; `fetch` and `vector` supply every tensor by name and shape."""
    d = config.hidden_size
    fetch = fetch if config.shared_blocks is None else fetched_once(fetch)
    embedding = fetch(names.embedding + ".weight", (config.vocab_size, d))
    embedding_norm = stored_norm(config, names.embedding_norm, d, vector) if config.embedding_norm else None
    ropes = [inverse_frequencies(rope) for rope in config.ropes]
    bias = _distance_bias(config, names, vector)
    return ModelWeights(
        config=config,
        embedding=embedding,
        position_embedding=_positions(config, names, fetch),
        layers=tuple(_layer(config, names, i, fetch, vector, bias) for i in range(config.num_layers)),
        final_norm=_final_norm(config, final_norm_name(config, names), vector),
        head=_head(config, names, embedding, fetch, vector),
        type_embedding=fetch(names.types + ".weight", (config.token_types, d)) if config.token_types else None,
        embedding_norm=embedding_norm,
        inverse_frequencies=tuple(frequencies for frequencies, _ in ropes),
        rope_scales=tuple(scale for _, scale in ropes),
        layer_inputs=assemble_layer_inputs(config, names.layer_inputs, fetch, vector),
        streams=assemble_streams(config, names.streams, fetch),
        hyper=None
        if names.compressed is None
        else assemble_hyper(config, names.compressed.end, "", fetch, vector, ends=True),
    )


def _positions(config: ModelConfig, names: TensorNames, fetch: Fetch) -> QuantizedTensor | Array | None:
    if not config.learned_positions:
        return None
    table = fetch(names.positions + ".weight", (config.position_offset + config.max_position, config.hidden_size))
    rows = slice(config.position_offset, None)
    if not config.position_offset:
        return table
    return table.select_rows(rows) if isinstance(table, QuantizedTensor) else table[rows]


def _head(
    config: ModelConfig, names: TensorNames, embedding: QuantizedTensor | Array, fetch: Fetch, vector: FetchVector
) -> Linear:
    if not config.language_head:
        return NO_LINEAR
    shape = config.vocab_size, config.hidden_size
    head = embedding if config.tie_embeddings else fetch(names.head + ".weight", shape)
    return Linear((head,), (vector(names.head + ".bias", shape[:1]) if config.head_bias else None,))


def _distance_bias(config: ModelConfig, names: TensorNames, vector: FetchVector) -> Array | None:
    if config.distance_bias == "none":
        return None
    shape = config.distance_buckets, config.num_heads
    return distance_bias(config, vector(names.distance_bias + ".weight", shape) if config.distance_buckets else None)


def final_norm_name(config: ModelConfig, names: TensorNames) -> str:
    """Of norms behind the MLPs the last one is that of the network."""
    return names.layer.format(config.num_layers - 1) + names.mlp_norm if config.residual_norms else names.final_norm


def assemble_layer(
    config: ModelConfig, names: TensorNames, prefix: str, fetch: Fetch, vector: FetchVector
) -> LayerWeights:
    """One layer by itself, whose names begin with `prefix`; `config` describes it as layer 0."""
    return _layer(config, replace(names, layer=prefix), 0, fetch, vector)


def network_tensors(config: ModelConfig, names: TensorNames) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the network, as stored in a file."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...]) -> Array:
        shapes[name] = shape[::-1] if names.is_transposed(name, shape) else shape
        return np.broadcast_to(np.float32(0), shape)

    assemble(config, names, note, note)
    return shapes


def _layer(
    config: ModelConfig,
    names: TensorNames,
    index: int,
    fetch: Fetch,
    vector: FetchVector,
    bias: Array | None = None,  # of attention, by distance
) -> LayerWeights:
    prefix = names.layer.format(index)
    home = names.layer.format(config.block_source(index))  # where attention and MLP are stored
    d, own = config.hidden_size, names.recurrent

    def linear(parts: tuple[str, ...], sizes: tuple[int, ...], inputs: int, bias: bool) -> Linear:
        sizes = sizes if len(parts) > 1 else (sum(sizes),)
        return Linear(
            tuple(fetch(f"{home}{part}.weight", (size, inputs)) for part, size in zip(parts, sizes, strict=True)),
            tuple(
                vector(f"{home}{part}.bias", (size,)) if bias else None for part, size in zip(parts, sizes, strict=True)
            ),
        )

    def post_norm(name: str, wanted: bool) -> Norm | None:
        has_norm = config.post_norms or own_layer.norms_outputs
        return stored_norm(config, prefix + name, d, vector) if has_norm and wanted else None

    def sub_norm(name: str, size: int, wanted: bool) -> Norm | None:
        return stored_norm(config, prefix + name, size, vector) if config.sub_norms and wanted else None

    def residual_norm(name: str, wanted: bool) -> Norm | None:
        has_norm = (config.pre_norms and not own_layer.norms_outputs) or config.residual_norms
        if not has_norm or not wanted:
            return None
        prefixed = (prefix if name == names.attention_norm else home) + name
        return _on_residual(config, stored_norm(config, prefixed, d, vector))

    def head_norm(name: str, heads: int, wanted: bool) -> Norm | None:
        if config.qk_norm_rotated:
            return Norm(np.ones(dim, np.float32), None, config.norm_eps) if wanted and is_rotated else None
        size = dim * (heads if config.qk_norm_all_heads else 1)
        return stored_norm(config, prefix + name, size, vector, rms=True) if config.qk_norm and wanted else None

    own_layer = config.layers[index]
    is_rotated = own_layer.rope is not None
    attends = own_layer.attention
    recurrent = None if own is None else assemble_recurrence(config, own, index, prefix, fetch, vector)
    mixes, has_mlp = attends or recurrent is not None, own_layer.mlp
    is_normed = config.bidirectional and config.embedding_norm and config.pre_norms and index == 0
    attention_norm = None if is_normed else residual_norm(names.attention_norm, mixes)
    ends_network = config.residual_norms and index == config.num_layers - 1  # its last norm is that of the network
    up, down = _mlp(config, names, index, linear)
    latent = assemble_latent(config, names.latent, index, prefix, fetch, vector) if attends else None
    compressed = assemble_compressed(config, names.compressed, index, prefix, fetch, vector)
    dim, kv_heads, writes = config.head_size(index), config.kv_heads(index), config.kv_source(index) == index
    value_size = config.num_heads * (config.value_dim(index) if config.mla is None else config.mla.value_size)
    if config.compressed is not None:
        value_size = config.compressed.output_groups * config.compressed.output_rank
    sinks = vector(prefix + names.sinks, (config.num_heads,)) if config.has_sinks(index) and attends else None
    query_norm = head_norm(names.query_norm, config.num_heads, attends)
    key_norm = head_norm(names.key_norm, kv_heads, attends and writes)
    gates = config.gate_size(index) if attends else 0
    return LayerWeights(
        shape=attention_shape(config, index, query_norm, key_norm, sinks, bias),
        attention_norm=attention_norm,
        qkv=NO_LINEAR
        if latent is not None or compressed is not None or not attends
        else _qkv(config, names, index, linear),
        output=linear((names.output,), (d,), value_size, config.output_bias) if attends else NO_LINEAR,
        post_attention_norm=post_norm(names.post_attention_norm, mixes),
        mlp_norm=residual_norm(names.mlp_norm, has_mlp and config.has_mlp_norm and not ends_network),
        up=up,
        down=down,
        post_mlp_norm=post_norm(names.post_mlp_norm, has_mlp),
        attention_sub_norm=sub_norm(names.attention_sub_norm, value_size, attends),
        mlp_sub_norm=sub_norm(names.mlp_sub_norm, config.mlp_size(index), has_mlp),
        rope=own_layer.rope if config.ropes else None,
        moe=_moe(config, names, index, prefix, fetch, vector) if config.has_experts(index) else None,
        latent=latent,
        recurrent=recurrent,
        gate=linear((names.gate,), (gates,), d, config.gate_bias) if gates else None,
        values=value_columns(config, index) if attends else None,
        kv_is_shared=any(layer.kv_source == index for layer in config.layers),
        cutoff=own_layer.cutoff,
        xielu=read_xielu(names.xielu, prefix, vector) if config.activation == "xielu" and has_mlp else None,
        scale=float(vector(prefix + names.layer_scale, (1,))[0]) if config.layer_scales else 1.0,
        inputs=assemble_gated_inputs(config, names.layer_inputs, index, prefix, fetch, vector),
        streams=assemble_layer_streams(config, names.streams, prefix, fetch, vector),
        mlp_shift=None if own is None else assemble_mlp_shift(config, own.rwkv, index, prefix, vector),
        shared=assemble_shared_use(config, names.shared, index, prefix, home, fetch, vector),
        compressed=compressed,
        hyper=assemble_layer_hyper(config, names.compressed, prefix, fetch, vector),
    )


def _qkv(config: ModelConfig, names: TensorNames, layer: int, linear: Callable[..., Linear]) -> Linear:
    """The projections of queries, keys and values; keys that are values, too, are projected twice."""
    dim, d = config.head_size(layer), config.attention_inputs
    query_size, kv_size = config.num_heads * dim, config.kv_heads(layer) * dim
    if config.kv_source(layer) != layer:
        return linear(names.qkv[:1], (query_size,), d, config.qkv_bias)
    if not config.layers[layer].keys_as_values:
        return linear(names.qkv, (query_size, kv_size, kv_size), d, config.qkv_bias)
    both = linear(names.qkv[:2], (query_size, kv_size), d, config.qkv_bias)
    return Linear((*both.parts, both.parts[1]), (*both.biases, both.biases[1]))


def _mlp(config: ModelConfig, names: TensorNames, layer: int, linear: Callable[..., Linear]) -> tuple[Linear, Linear]:
    """The projections of a layer's MLP, or of the shared MLP beside its experts."""
    d, ffn = config.hidden_size, config.mlp_size(layer)
    beside = config.moe is not None and config.moe.beside_mlp
    if config.layers[layer].mlp and (beside or not config.has_experts(layer)):
        up = linear(names.up, (ffn, ffn) if config.gated_mlp else (ffn,), d, config.mlp_bias)
        return up, linear((names.down,), (d,), ffn, config.mlp_bias)
    width = 0 if config.moe is None or not config.layers[layer].mlp else config.moe.shared_size
    if not width:
        return NO_LINEAR, NO_LINEAR
    widths = (width, width) if config.gated_mlp else (width,)
    return linear(names.shared_up, widths, d, False), linear((names.shared_down,), (d,), width, False)


def _moe(
    config: ModelConfig, names: TensorNames, layer: int, prefix: str, fetch: Fetch, vector: FetchVector
) -> MoeWeights | None:
    moe = config.moe
    if moe is None:
        return None
    d, width, count = config.hidden_size, moe.expert_size, moe.num_experts
    routed, is_hashed = count + moe.zero_experts, config.layers[layer].hashed

    def of_experts(parts: tuple[str, ...], rows: int, columns: int) -> tuple[Linear, ...]:
        rows = rows * (2 if parts is names.expert_up and len(parts) == 1 and config.gated_mlp else 1)
        weights = [stacked_matrices(prefix + part, count, (rows, columns), fetch) for part in parts]
        biases = [vector(f"{prefix}{part}.bias", (count, rows)) if moe.expert_bias else None for part in parts]
        return tuple(
            Linear(tuple(each[e] for each in weights), tuple(None if bias is None else bias[e] for bias in biases))
            for e in range(count)
        )

    def norm(name: str) -> Norm | None:
        return stored_norm(config, prefix + name, d, vector) if moe.beside_mlp else None

    router_norm = None
    if moe.beside_mlp:
        router_norm = Norm(vector(prefix + names.router_scale, (d,)) / np.float32(d**0.5), None, config.norm_eps)
    router_bias = vector(f"{prefix}{names.router}.bias", (routed,)) if moe.router_bias else None
    gate = Linear((fetch(f"{prefix}{names.shared_gate}.weight", (1, d)),), (None,)) if moe.shared_gate else None
    return MoeWeights(
        router=Linear((fetch(f"{prefix}{names.router}.weight", (routed, d)),), (router_bias,)),
        choice=Router(
            top_k=moe.top_k,
            scoring=moe.scoring,
            renormalise=moe.renormalise,
            scale=moe.scale,
            bias=vector(prefix + names.selection_bias, (routed,)) if moe.selection_bias and not is_hashed else None,
            num_groups=moe.num_groups,
            top_groups=moe.top_groups,
            group_best=moe.group_best,
            expert_scales=vector(prefix + names.expert_scales, (count,)) if moe.beside_mlp else None,
            band=moe.band,
        ),
        experts=Experts(
            of_experts(names.expert_up, width, d),
            of_experts((names.expert_down,), d, width),
            config.activation,
            config.gated_mlp,
        ),
        shared_gate=gate,
        scales_inputs=moe.scales_inputs,
        shared_mean=moe.shared_mean,
        has_identities=moe.zero_experts > 0,
        is_shortcut=moe.shortcut,
        router_norm=router_norm,
        input_norm=norm(names.expert_norm),
        output_norm=norm(names.post_expert_norm),
        mlp_output_norm=norm(names.post_shared_norm),
        table=read_table(config, names.compressed, prefix, vector) if is_hashed else None,
    )


def _on_residual(config: ModelConfig, norm: Norm) -> Norm:
    """The norm of a residual stream that is divided by `residual_scale`, so that outputs are added as they are."""
    return replace(norm, eps=norm.eps / config.residual_scale**2)


def _final_norm(config: ModelConfig, name: str, vector: FetchVector) -> Norm:
    """The last norm; its weights contain the scale of the logits."""
    norm = _on_residual(config, stored_norm(config, name, config.hidden_size, vector))
    if config.logit_scale == 1.0:
        return norm
    bias = None if norm.bias is None else norm.bias * config.logit_scale
    return replace(norm, weight=norm.weight * config.logit_scale, bias=bias)
