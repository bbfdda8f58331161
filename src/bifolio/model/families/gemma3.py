"""Gemma 3: norms before and after attention and MLP, scaled embeddings, five layers with a window, then one without.

Layers with a window have a separate rope base without scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.families.family import Family, usual_scale
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    largest_window,
    read_activation,
    windows_by_type,
    write_activation,
    written_layer_types,
)
from bifolio.model.tensor_names import HF_LLAMA

NORM_OFFSET = 1.0
WINDOW_PERIOD = 6
HF_NAMES = replace(
    HF_LLAMA,
    mlp_norm="pre_feedforward_layernorm",
    post_attention_norm="post_attention_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)
LARGEST_LAYERS = 62  # the 27B model scales attention by hidden_size / heads instead of the head size


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    if raw["model_type"] == "gemma3" and isinstance(raw.get("text_config"), Mapping):
        raw = raw["text_config"]  # a model of text and images
    scalar = raw.get("query_pre_attn_scalar")
    return decoder_from_hf(
        raw,
        name,
        activation=read_activation(raw.get("hidden_activation")),
        norm_offset=NORM_OFFSET,
        qk_norm=True,
        post_norms=True,
        tie_embeddings=bool(raw.get("tie_word_embeddings", True)),
        layer_window=windows_by_type(raw),
        embedding_scale=math.sqrt(int(raw["hidden_size"])),
        attention_scale=float(scalar) ** -0.5 if scalar else 0.0,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "sliding_window": largest_window(config),
        "layer_types": written_layer_types(config),
        "hidden_activation": write_activation(config, "gelu_pytorch_tanh"),
        "query_pre_attn_scalar": whole(config.scale**-2),
        "final_logit_softcapping": config.logit_softcap or None,
        "rope_local_base_freq": config.ropes[-1].theta,
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    config = decoder_from_gguf(
        file,
        metadata,
        name,
        window_period=WINDOW_PERIOD,
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        embedding_scale=math.sqrt(metadata.count(".embedding_length")),
    )
    if config.num_layers == LARGEST_LAYERS and not metadata.has(".attention.scale"):
        config = replace(config, attention_scale=gguf_scale(config))
    if not config.layer_window:
        return config
    rope = config.ropes[0]
    local = RopeConfig(metadata.number(".rope.freq_base_swa", 10000.0), rope.rotary_dim)
    layer_rope = tuple(int(window is not None) for window in config.layer_window)
    return replace(config, ropes=(rope, local), layer_rope=layer_rope)


def gguf_scale(config: ModelConfig) -> float:
    if config.num_layers == LARGEST_LAYERS:
        return float((config.hidden_size / config.num_heads) ** -0.5)
    return usual_scale(config)


def whole(value: float) -> int | float:
    """Undo the f32 rounding of an integer stored in a file, because transformers requires the integer."""
    return round(value) if abs(value - round(value)) < 1e-5 * value else value


FAMILY = Family(
    name="gemma3",
    hf_types=("gemma3_text", "gemma3"),
    hf_class="Gemma3ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=HF_NAMES,
    norm_offset=NORM_OFFSET,
    gguf_architectures=("gemma3",),
    written_as="gemma3",
    config_from_gguf=config_from_gguf,
    gguf_activation="gelu_tanh",
    gguf_window_period=WINDOW_PERIOD,
    gguf_scale=gguf_scale,
)
