"""OLMo 3: OLMo 2 with a window on three of four layers. Its GGUF files have the architecture `olmo2`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.families.family import Family
from bifolio.model.families.olmo2 import HF_NAMES, NETWORK, WINDOW_PERIOD, local_rope
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    largest_window,
    rope_scaling,
    windows_by_type,
    written_layer_types,
)

DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0}


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    config = decoder_from_hf(raw, name, layer_window=windows_by_type(raw, WINDOW_PERIOD), **NETWORK)
    parameters = raw.get("rope_parameters")
    nested = isinstance(parameters, Mapping) and "full_attention" in parameters
    return config if nested else local_rope(config)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    flat = {key: value for key, value in decoder_to_hf(config).items() if not key.startswith("rope_")}
    return {
        **flat,
        "attention_bias": config.qkv_bias,
        "sliding_window": largest_window(config),
        "layer_types": written_layer_types(config),
        "rope_parameters": {
            "full_attention": _written(config.ropes[0]),
            "sliding_attention": _written(config.ropes[-1]),
        },
    }


def _written(rope: RopeConfig) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": rope.theta, **(rope_scaling(rope) or {})}


FAMILY = Family(
    name="olmo3",
    hf_types=("olmo3",),
    hf_class="Olmo3ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=HF_NAMES,
    written_as="olmo2",
    gguf_window_period=WINDOW_PERIOD,
)
