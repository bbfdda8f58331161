"""Qwen2 and Qwen2.5: biases on queries, keys and values; windows on the upper layers of some models."""

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


def read_windows(raw: Raw) -> tuple[int | None, ...]:
    """The window of every layer: by `layer_types`, or else for layers from `max_window_layers` on."""
    window = raw.get("sliding_window")
    if not window or not raw.get("use_sliding_window", False):
        return ()
    if raw.get("layer_types") is not None:
        return windows_by_type(raw)
    num_layers = int(raw["num_hidden_layers"])
    first = int(raw.get("max_window_layers", num_layers))
    return tuple(int(window) if layer >= first else None for layer in range(num_layers))


def write_windows(config: ModelConfig) -> dict[str, Any]:
    window = largest_window(config)
    if window is None:
        return {}
    return {"use_sliding_window": True, "sliding_window": window, "layer_types": written_layer_types(config)}


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    return decoder_from_hf(raw, name, qkv_bias=True, output_bias=False, layer_window=read_windows(raw))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {**decoder_to_hf(config), **write_windows(config)}


FAMILY = Family(
    name="qwen2",
    hf_types=("qwen2",),
    hf_class="Qwen2ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architectures=("qwen2",),
    written_as="qwen2",
)
