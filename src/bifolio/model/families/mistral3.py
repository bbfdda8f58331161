"""Ministral 3 and the text part of Mistral Small 3: Mistral whose queries grow with the log of their position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, largest_window, rope_scaling


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    if isinstance(raw.get("text_config"), Mapping):
        raw = raw["text_config"]  # a model of text and images
    raw = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, **raw}
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return decoder_from_hf(
        raw,
        name,
        attention_temperature=float(parameters.get("llama_4_scaling_beta") or 0.0),
        temperature_period=int(parameters.get("original_max_position_embeddings") or 1),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    rope = config.ropes[0]
    flat = {key: value for key, value in decoder_to_hf(config).items() if not key.startswith("rope_")}
    return {
        **flat,
        "sliding_window": largest_window(config),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rope.theta,
            **(rope_scaling(rope) or {}),
            "original_max_position_embeddings": config.temperature_period,
            "llama_4_scaling_beta": config.attention_temperature,
        },
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    period = metadata.count(".rope.scaling.original_context_length", 1) or 1
    scale = metadata.number(".attention.temperature_scale", 0.0)
    config = decoder_from_gguf(file, metadata, name, attention_temperature=scale, temperature_period=period)
    multiplier = metadata.number(".rope.scaling.yarn_log_multiplier", 0.0)
    rope = config.ropes[0]
    if not multiplier or rope.scaling != "yarn":
        return config
    growth = 0.1 * math.log(max(rope.factor, 1.0))  # the file gives the divisor of yarn's default factor
    return replace(config, ropes=(replace(rope, attention_factor=(1 + growth) / (1 + multiplier * growth)),))


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    if not config.attention_temperature:
        return {}
    return {
        "attention.temperature_scale": config.attention_temperature,
        "rope.scaling.original_context_length": config.temperature_period,
    }


FAMILY = Family(
    name="mistral3",
    hf_types=("ministral3", "mistral3"),
    hf_class="Ministral3ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architectures=("mistral3",),
    written_as="mistral3",
    config_from_gguf=config_from_gguf,
    gguf_interleaved=True,
    gguf_entries=gguf_entries,
)
