"""ERNIE 4.5 (dense): Llama with rope on neighbouring pairs."""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf

DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True}


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    bias = bool(raw.get("use_bias", False))
    return decoder_from_hf({**DEFAULTS, **raw}, name, qkv_bias=bias, output_bias=bias, mlp_bias=bias)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {**decoder_to_hf(config), "use_bias": config.qkv_bias}


FAMILY = Family(
    name="ernie4_5",
    hf_types=("ernie4_5",),
    hf_class="Ernie4_5ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_interleaved=True,
    gguf_architectures=("ernie4_5",),
    written_as="ernie4_5",
    gguf_interleaved=True,
)
