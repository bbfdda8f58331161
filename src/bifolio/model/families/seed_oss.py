"""Seed-OSS: Llama with biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf
from bifolio.model.tensor_names import GGUF_LLAMA


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    return decoder_from_hf(
        raw,
        name,
        qkv_bias=bool(raw.get("attention_bias", True)),
        output_bias=bool(raw.get("attention_out_bias", False)),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "attention_bias": config.qkv_bias,
        "attention_out_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
    }


FAMILY = Family(
    name="seed_oss",
    hf_types=("seed_oss",),
    hf_class="SeedOssForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architectures=("seed_oss",),
    written_as="seed_oss",
    gguf_names=replace(GGUF_LLAMA, mlp_norm="post_attention_norm"),
)
