"""Tensor names by role, and the function that assembles the weights.

The tables here are those of Llama, which most families share; other families define theirs in `model/families/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bifolio.config import ModelConfig
from bifolio.kernels.interface import Array, Linear, Norm
from bifolio.model.weights import LayerWeights, ModelWeights, attention_shape, inverse_frequencies
from bifolio.quant.tensor import QuantizedTensor

Tensor = QuantizedTensor | Array
Fetch = Callable[[str, tuple[int, ...]], Tensor]  # (full name, expected shape [out, in]) -> tensor, or a named error
FetchVector = Callable[[str, tuple[int, ...]], Array]  # the same as f32 array, for norms and biases


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
    query_norm: str = ""
    key_norm: str = ""
    post_attention_norm: str = ""
    post_mlp_norm: str = ""
    transposed: bool = False  # matrices of layers are stored as [in, out]

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
)


def assemble(config: ModelConfig, names: TensorNames, fetch: Fetch, vector: FetchVector) -> ModelWeights:
    """Build the weights; `fetch` and `vector` supply every tensor by name and shape."""
    d = config.hidden_size
    embedding = fetch(names.embedding + ".weight", (config.vocab_size, d))
    positions = fetch(names.positions + ".weight", (config.max_position, d)) if config.learned_positions else None
    ropes = [inverse_frequencies(rope, config.max_position) for rope in config.ropes]
    head = embedding if config.tie_embeddings else fetch(names.head + ".weight", (config.vocab_size, d))
    return ModelWeights(
        config=config,
        embedding=embedding,
        position_embedding=positions,
        layers=tuple(_layer(config, names, i, fetch, vector) for i in range(config.num_layers)),
        final_norm=_final_norm(config, names.final_norm, vector),
        head=Linear((head,), (None,)),
        inverse_frequencies=tuple(frequencies for frequencies, _ in ropes),
        rope_scales=tuple(scale for _, scale in ropes),
    )


def network_tensors(config: ModelConfig, names: TensorNames) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the network, as stored in a file."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...]) -> Array:
        shapes[name] = shape[::-1] if names.is_transposed(name, shape) else shape
        return np.zeros(1, np.float32)

    assemble(config, names, note, note)
    return shapes


def _layer(config: ModelConfig, names: TensorNames, index: int, fetch: Fetch, vector: FetchVector) -> LayerWeights:
    prefix = names.layer.format(index)
    d, ffn = config.hidden_size, config.intermediate_size

    def linear(parts: tuple[str, ...], sizes: tuple[int, ...], inputs: int, bias: bool) -> Linear:
        sizes = sizes if len(parts) > 1 else (sum(sizes),)
        return Linear(
            tuple(fetch(f"{prefix}{part}.weight", (size, inputs)) for part, size in zip(parts, sizes, strict=True)),
            tuple(
                vector(f"{prefix}{part}.bias", (size,)) if bias else None
                for part, size in zip(parts, sizes, strict=True)
            ),
        )

    def post_norm(name: str) -> Norm | None:
        return _norm(config, prefix + name, d, vector) if config.post_norms else None

    def pre_norm(name: str) -> Norm | None:
        return _on_residual(config, _norm(config, prefix + name, d, vector)) if config.pre_norms else None

    def head_norm(name: str, size: int) -> Norm | None:
        size = size if config.qk_norm_all_heads else config.head_dim
        return _norm(config, prefix + name, size, vector, rms=True) if config.qk_norm else None

    query_norm = head_norm(names.query_norm, config.query_size)
    return LayerWeights(
        shape=attention_shape(config, index, query_norm, head_norm(names.key_norm, config.kv_size)),
        attention_norm=pre_norm(names.attention_norm),
        qkv=linear(names.qkv, (config.query_size, config.kv_size, config.kv_size), d, config.qkv_bias),
        output=linear((names.output,), (d,), config.query_size, config.output_bias),
        post_attention_norm=post_norm(names.post_attention_norm),
        mlp_norm=None if config.parallel_block else pre_norm(names.mlp_norm),
        up=linear(names.up, (ffn, ffn) if config.gated_mlp else (ffn,), d, config.mlp_bias),
        down=linear((names.down,), (d,), ffn, config.mlp_bias),
        post_mlp_norm=post_norm(names.post_mlp_norm),
        rope=config.rope_index(index) if config.ropes else None,
    )


def _norm(config: ModelConfig, name: str, size: int, vector: FetchVector, rms: bool = False) -> Norm:
    centered = config.norm == "layer" and not rms
    weight = vector(name + ".weight", (size,))
    if config.norm_offset:
        weight = weight + config.norm_offset  # a Python float keeps the dtype of the array
    bias = vector(name + ".bias", (size,)) if centered and config.norm_bias else None
    return Norm(weight, bias, config.norm_eps, centered)


def _on_residual(config: ModelConfig, norm: Norm) -> Norm:
    """The norm of a residual stream that is divided by `residual_scale`, so that outputs are added as they are."""
    return replace(norm, eps=norm.eps / config.residual_scale**2)


def _final_norm(config: ModelConfig, name: str, vector: FetchVector) -> Norm:
    """The last norm; its weights contain the scale of the logits."""
    norm = _on_residual(config, _norm(config, name, config.hidden_size, vector))
    if config.logit_scale == 1.0:
        return norm
    bias = None if norm.bias is None else norm.bias * config.logit_scale
    return replace(norm, weight=norm.weight * config.logit_scale, bias=bias)
