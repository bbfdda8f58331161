"""Gemma 2: Gemma 3 without norms of heads, with soft-capped scores and logits, and a window on every second layer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family, usual_scale
from bifolio.model.families.gemma3 import HF_NAMES, NORM_OFFSET, whole
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

DEFAULT_WINDOW = 4096
DEFAULTS = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": DEFAULT_WINDOW,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "tie_word_embeddings": True}  # fmt: skip
WINDOW_PERIOD = 2
LARGEST_LAYERS = 46  # the 27B model scales attention by hidden_size / heads instead of the head size


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    return decoder_from_hf(
        raw,
        name,
        activation=read_activation(raw["hidden_activation"] or raw.get("hidden_act")),
        norm_offset=NORM_OFFSET,
        post_norms=True,
        layer_window=windows_by_type(raw, WINDOW_PERIOD),
        embedding_scale=math.sqrt(int(raw["hidden_size"])),
        attention_scale=float(raw["query_pre_attn_scalar"]) ** -0.5,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "sliding_window": largest_window(config),
        "layer_types": written_layer_types(config),
        "hidden_activation": write_activation(config, "gelu_pytorch_tanh"),
        "query_pre_attn_scalar": whole(config.scale**-2),
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    config = decoder_from_gguf(
        file,
        metadata,
        name,
        window_period=WINDOW_PERIOD,
        activation="gelu_tanh",
        post_norms=True,
        embedding_scale=math.sqrt(metadata.count(".embedding_length")),
        attention_softcap=metadata.number(".attn_logit_softcapping", 50.0),
        logit_softcap=metadata.number(".final_logit_softcapping", 30.0),
    )
    if not config.layer_window:  # older files do not say it
        windows = (DEFAULT_WINDOW, None) * config.num_layers
        config = replace(config, layer_window=windows[: config.num_layers])
    return config if config.attention_scale else replace(config, attention_scale=gguf_scale(config))


def gguf_scale(config: ModelConfig) -> float:
    if config.num_layers == LARGEST_LAYERS:
        return float((config.hidden_size // config.num_heads) ** -0.5)
    return usual_scale(config)


FAMILY = Family(
    name="gemma2",
    hf_types=("gemma2",),
    hf_class="Gemma2ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=HF_NAMES,
    norm_offset=NORM_OFFSET,
    gguf_architectures=("gemma2",),
    written_as="gemma2",
    config_from_gguf=config_from_gguf,
    gguf_activation="gelu_tanh",
    gguf_window_period=WINDOW_PERIOD,
    gguf_scale=gguf_scale,
)
