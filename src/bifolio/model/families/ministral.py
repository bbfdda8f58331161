"""Ministral 8B: Mistral with a window on some layers. Its GGUF files have the architecture `llama`."""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    largest_window,
    windows_by_type,
    written_layer_types,
)


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    windows: dict[str, Any] = {"layer_window": windows_by_type(raw)} if raw.get("layer_types") is not None else {}
    return decoder_from_hf(raw, name, **windows)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "sliding_window": largest_window(config),
        "layer_types": written_layer_types(config),
    }


FAMILY = Family(
    name="ministral",
    hf_types=("ministral",),
    hf_class="MinistralForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    written_as="llama",
    gguf_interleaved=True,
)
