"""SmolLM3: Llama whose every fourth layer has no rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.families.qwen2 import write_windows
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, windows_by_type

DEFAULTS = {"tie_word_embeddings": True, "rope_theta": 2000000.0, "no_rope_layer_interval": 4}
NO_ROPE_PERIOD = 4


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    has_rope = raw.get("no_rope_layers") or _pattern(int(raw["num_hidden_layers"]), int(raw["no_rope_layer_interval"]))
    return decoder_from_hf(
        raw,
        name,
        layer_rope=tuple(0 if rotates else None for rotates in has_rope),
        layer_window=_windows(raw, has_rope),
    )


def _pattern(num_layers: int, period: int) -> list[bool]:
    """Whether each layer has rope."""
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def _windows(raw: Raw, has_rope: list[bool]) -> tuple[int | None, ...]:
    """By `layer_types`, or else a window on layers without rope."""
    if not raw.get("use_sliding_window") or not raw.get("sliding_window"):
        return ()
    if raw.get("layer_types") is not None:
        return windows_by_type(raw)
    return tuple(None if rotates else int(raw["sliding_window"]) for rotates in has_rope)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        **write_windows(config),
        "pad_token_id": None,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "no_rope_layers": [int(config.rope_index(layer) is not None) for layer in range(config.num_layers)],
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    config = decoder_from_gguf(file, metadata, name)
    has_rope = _pattern(config.num_layers, NO_ROPE_PERIOD)
    return replace(config, layer_rope=tuple(0 if rotates else None for rotates in has_rope))


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    has_rope = [config.rope_index(layer) is not None for layer in range(config.num_layers)]
    if has_rope != _pattern(config.num_layers, NO_ROPE_PERIOD):
        raise UnsupportedModelError("GGUF describes SmolLM3 models whose every fourth layer has no rope, and no others")
    return {}


FAMILY = Family(
    name="smollm3",
    hf_types=("smollm3",),
    hf_class="SmolLM3ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architectures=("smollm3",),
    written_as="smollm3",
    config_from_gguf=config_from_gguf,
    gguf_interleaved=True,
    gguf_entries=gguf_entries,
)
