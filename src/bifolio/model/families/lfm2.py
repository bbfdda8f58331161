"""LFM2: gated short convolutions, and attention in some of the layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import LayerConfig, ModelConfig, RecurrentConfig, RopeConfig
from bifolio.model.description import Reading
from bifolio.model.families.family import Family, fresh_decoder
from bifolio.model.fields import Field, Form, Key
from bifolio.model.recurrent_fields import EITHER, HEADS_BY_LAYER
from bifolio.model.recurrent_tensors import RecurrentNames
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.window_fields import TYPES, named_kinds

THETA = 1000000.0
TIED = "tie_word_embeddings"
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


def layer_kinds(values: Reading) -> tuple[bool, ...]:
    """Whether each layer has attention."""
    if values.json.get(TYPES) is not None:
        return tuple(kind != "conv" for kind in named_kinds(values))
    key = "full_attn_idxs"
    attention = values.json.counts(key, least=0)
    return tuple(values.json.get(key) is None or layer in attention for layer in values.layers)


def mlp_size(values: Reading) -> int:
    """The width of the MLP; most files name a larger one, of which two thirds, rounded up, are used."""
    json = values.json
    size = json.count("block_ff_dim" if json.get("block_ff_dim") is not None else "intermediate_size")
    if not json.flag("block_auto_adjust_ff_dim", True):
        return size
    size, factor = int(2 * size / 3), "block_ffn_dim_multiplier"
    if json.get(factor) is None:
        return size
    unit = json.count("block_multiple_of", 256)
    return unit * -(-int(json.number(factor) * size) // unit)


def fresh_config(*, hidden_size: int, num_heads: int, num_layers: int, **sizes: Any) -> ModelConfig:
    """Attention in the last of every three layers, or in the only ones of a small network."""
    attention = tuple(range(PERIOD - 1, num_layers, PERIOD)) or (num_layers - 1,)
    return fresh_decoder(
        "lfm2",
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_layers=num_layers,
        qk_norm=True,
        ropes=(RopeConfig(THETA, hidden_size // num_heads),),
        layers=tuple(LayerConfig(attention=n in attention, recurrent=n not in attention) for n in range(num_layers)),
        recurrent=RecurrentConfig("conv", width=WIDTH, channels=hidden_size, has_norm=False),
        **sizes,
    )


CONVOLUTIONS = (
    *HEADS_BY_LAYER,
    EITHER,
    Field(
        "layers.attention",
        hf=Form(layer_kinds, lambda v: {TYPES: ["full_attention" if has else "conv" for has in v["layers.attention"]]}),
    ),
    Field("recurrent.kind", default="conv"),
    Field("recurrent.width", hf=Key("conv_L_cache", default=WIDTH), gguf="shortconv.l_cache"),
    Field("recurrent.channels", default=lambda v: v["hidden_size"]),
    Field("recurrent.conv_bias", hf="conv_bias"),
    Field("recurrent.projection_bias", default=lambda v: v["recurrent.conv_bias"]),
    Field("recurrent.has_norm", default=False),
    Field("norm_eps", hf=Key("norm_eps", default=1e-5)),
    Field("tie_embeddings", hf=Key(("tie_embedding", TIED), written=TIED, default=True)),
)
DEFAULTS = {"rope_theta": THETA, "max_position_embeddings": 128000}

FAMILY = Family(
    name="lfm2",
    network={"qk_norm": True},
    fields=(*CONVOLUTIONS, Field("intermediate_size", hf=Key("intermediate_size", reader=mlp_size))),
    hf_types=("lfm2",),
    hf_class="Lfm2ForCausalLM",
    hf_defaults={**DEFAULTS, "block_ffn_dim_multiplier": 1.0},
    hf_written={"block_auto_adjust_ff_dim": False},
    hf_names=HF_NAMES,
    gguf_architectures=("lfm2",),
    gguf_names=GGUF_NAMES,
    fresh_config=fresh_config,
)
