"""Command R7B, Command A and Aya (Cohere 2): attention and MLP side by side on one layer norm without a bias.

Three of four layers have a window and rope on neighbouring pairs; the fourth has neither. Logits are scaled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    largest_window,
    windows_by_type,
    written_layer_types,
)

NETWORK: dict[str, Any] = {"norm": "layer", "norm_bias": False, "parallel_block": True}
DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096, "tie_word_embeddings": True}
WINDOW_PERIOD = 4


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    config = decoder_from_hf(
        raw,
        name,
        norm_eps=float(raw["layer_norm_eps"]),
        layer_window=windows_by_type(raw, WINDOW_PERIOD),
        logit_scale=float(raw["logit_scale"]),
        **NETWORK,
    )
    return local_positions(config)


def local_positions(config: ModelConfig) -> ModelConfig:
    """Only layers with a window have rope."""
    return replace(config, layer_rope=tuple(None if window is None else 0 for window in config.layer_window))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "layer_norm_eps": config.norm_eps,
        "attention_bias": config.qkv_bias,
        "sliding_window": largest_window(config),
        "layer_types": written_layer_types(config),
        "logit_scale": config.logit_scale,
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    scale = metadata.number(".logit_scale", 1.0) or 1.0
    config = decoder_from_gguf(file, metadata, name, window_period=WINDOW_PERIOD, logit_scale=scale, **NETWORK)
    return local_positions(config)


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    return {"logit_scale": config.logit_scale, "rope.scaling.type": "none"}


FAMILY = Family(
    name="cohere2",
    hf_types=("cohere2",),
    hf_class="Cohere2ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_interleaved=True,
    gguf_architectures=("cohere2",),
    written_as="cohere2",
    config_from_gguf=config_from_gguf,
    gguf_interleaved=True,
    gguf_window_period=WINDOW_PERIOD,
    gguf_entries=gguf_entries,
)
