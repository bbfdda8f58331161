"""Granite 3 and 4 (dense): Llama with factors on embeddings, residual additions, attention scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    return decoder_from_hf(
        raw,
        name,
        embedding_scale=float(raw.get("embedding_multiplier", 1.0)),
        residual_scale=float(raw.get("residual_multiplier", 1.0)),
        attention_scale=float(raw.get("attention_multiplier", 1.0)),
        logit_scale=1 / float(raw.get("logits_scaling", 1.0)),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "embedding_multiplier": config.embedding_scale,
        "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.scale,
        "logits_scaling": 1 / config.logit_scale,
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    return replace(
        decoder_from_gguf(file, metadata, name),
        embedding_scale=metadata.number(".embedding_scale", 1.0) or 1.0,
        residual_scale=metadata.number(".residual_scale", 1.0) or 1.0,
        logit_scale=1 / (metadata.number(".logit_scale", 1.0) or 1.0),
    )


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    return {
        "embedding_scale": config.embedding_scale,
        "residual_scale": config.residual_scale,
        "logit_scale": 1 / config.logit_scale,
    }


FAMILY = Family(
    name="granite",
    hf_types=("granite",),
    hf_class="GraniteForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architectures=("granite",),
    written_as="granite",
    config_from_gguf=config_from_gguf,
    gguf_interleaved=True,
    gguf_entries=gguf_entries,
)
