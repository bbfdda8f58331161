"""LFM2: gated short convolutions, and attention in some of the layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, RecurrentConfig, RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.gguf.recurrent_entries import attention_entries, attention_layers
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, kinds_of_layers
from bifolio.model.recurrent_tensors import RecurrentNames
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

THETA = 1000000.0
WIDTH = 3  # of the convolutions
PERIOD = 3  # layers of a new network, of which one has attention
HF_NAMES = replace(
    HF_LLAMA,
    attention_norm="operator_norm",
    output="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    mlp_norm="ffn_norm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    final_norm="model.embedding_norm",
    recurrent=RecurrentNames((("conv.in_proj", 3),), conv="conv.conv", output="conv.out_proj", conv_axis=True),
)
GGUF_NAMES = replace(
    GGUF_LLAMA,
    final_norm="token_embd_norm",
    recurrent=RecurrentNames((("shortconv.in_proj", 3),), conv="shortconv.conv", output="shortconv.out_proj"),
)


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    return hybrid_from_hf(raw, name, intermediate_size=_mlp_size(raw))


def hybrid_from_hf(raw: Raw, name: str, *, intermediate_size: int, **overrides: Any) -> ModelConfig:
    """`overrides` are fields of `ModelConfig` in which a model differs."""
    kinds, bias = _layer_kinds(raw), bool(raw.get("conv_bias", False))
    recurrent = RecurrentConfig(
        "conv",
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "conv"),
        attention_layers=tuple(layer for layer, kind in enumerate(kinds) if kind != "conv"),
        width=int(raw.get("conv_L_cache", WIDTH)),
        channels=int(raw["hidden_size"]),
        conv_bias=bias,
        projection_bias=bias,
        has_norm=False,
    )
    return decoder_from_hf(
        {"rope_theta": THETA, "max_position_embeddings": 128000, **raw, "intermediate_size": intermediate_size},
        name,
        norm_eps=float(raw.get("norm_eps", 1e-5)),
        tie_embeddings=bool(raw.get("tie_embedding", raw.get("tie_word_embeddings", True))),
        qk_norm=True,
        recurrent=recurrent,
        **overrides,
    )


def _layer_kinds(raw: Raw) -> list[str]:
    """'conv' or 'full_attention' for every layer."""
    if raw.get("layer_types") is not None:
        return kinds_of_layers(raw, raw["layer_types"])
    layers = range(int(raw["num_hidden_layers"]))
    attention = raw.get("full_attn_idxs")
    return ["full_attention" if attention is None or layer in attention else "conv" for layer in layers]


def _mlp_size(raw: Raw) -> int:
    """The width of the MLP; most files name a larger one, of which two thirds, rounded up, are used."""
    size = int(raw.get("block_ff_dim", raw.get("intermediate_size", 0)))
    if not raw.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    factor, unit = raw.get("block_ffn_dim_multiplier", 1.0), int(raw.get("block_multiple_of", 256))
    return size if factor is None else unit * -(-int(factor * size) // unit)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return hybrid_to_hf(config) | {"block_auto_adjust_ff_dim": False}


def hybrid_to_hf(config: ModelConfig) -> dict[str, Any]:
    own = config.recurrent
    if own is None:
        raise UnsupportedModelError("a folder of LFM2 describes convolutions, which the model lacks")
    layers = range(config.num_layers)
    fields = decoder_to_hf(config)
    return {
        **{name: value for name, value in fields.items() if name != "rms_norm_eps"},
        "norm_eps": config.norm_eps,
        "conv_L_cache": own.width,
        "conv_bias": own.conv_bias,
        "layer_types": ["conv" if layer in own.layers else "full_attention" for layer in layers],
    }


def fresh_config(*, hidden_size: int, num_heads: int, num_layers: int, **sizes: Any) -> ModelConfig:
    """Attention in the last of every three layers, or in the only ones of a small network."""
    head_dim = hidden_size // num_heads
    attention = tuple(range(PERIOD - 1, num_layers, PERIOD)) or (num_layers - 1,)
    return ModelConfig(
        architecture="lfm2",
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_layers=num_layers,
        head_dim=head_dim,
        qk_norm=True,
        tie_embeddings=True,
        ropes=(RopeConfig(THETA, head_dim),),
        recurrent=RecurrentConfig(
            "conv",
            layers=tuple(layer for layer in range(num_layers) if layer not in attention),
            attention_layers=attention,
            width=WIDTH,
            channels=hidden_size,
            has_norm=False,
        ),
        **sizes,
    )


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    return hybrid_from_gguf(file, metadata, name)


def hybrid_from_gguf(file: GgufFile, metadata: Metadata, name: str, **overrides: Any) -> ModelConfig:
    count = metadata.count(".block_count")
    attention = attention_layers(metadata, count)
    recurrent = RecurrentConfig(
        "conv",
        layers=tuple(layer for layer in range(count) if layer not in attention),
        attention_layers=tuple(attention),
        width=metadata.count(".shortconv.l_cache"),
        channels=metadata.count(".embedding_length"),
        has_norm=False,
    )
    equal = metadata.without_zeros(".attention.head_count_kv")
    return decoder_from_gguf(file, equal, name, qk_norm=True, recurrent=recurrent, **overrides)


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    own = config.recurrent
    if own is None or own.conv_bias:
        raise UnsupportedModelError("GGUF describes gated convolutions without biases only")
    return {"shortconv.l_cache": own.width, **attention_entries(config)}


FAMILY = Family(
    name="lfm2",
    hf_types=("lfm2",),
    hf_class="Lfm2ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=HF_NAMES,
    gguf_architectures=("lfm2",),
    written_as="lfm2",
    config_from_gguf=config_from_gguf,
    gguf_names=GGUF_NAMES,
    gguf_entries=gguf_entries,
    fresh_config=fresh_config,
)
