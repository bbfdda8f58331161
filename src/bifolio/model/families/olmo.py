"""OLMo 1: Llama with layer norms that have neither weights nor biases."""

from __future__ import annotations

import math
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf

NETWORK: dict[str, Any] = {"norm": "layer", "norm_weight": False, "norm_bias": False}
NORM_EPS = 1e-5
CLIPPED = "OLMo with clipped queries, keys and values (clip_qkv) is not supported"


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    if raw.get("clip_qkv") is not None:
        raise UnsupportedModelError(CLIPPED)
    raw = {"eos_token_id": 50279, **raw}
    return decoder_from_hf(raw, name, norm_eps=NORM_EPS, mlp_bias=False, **NETWORK)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    if not math.isclose(config.norm_eps, NORM_EPS, rel_tol=1e-6):
        raise UnsupportedModelError(f"a folder of this family describes norms with an epsilon of {NORM_EPS} only")
    return {**decoder_to_hf(config), "attention_bias": config.qkv_bias}


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    if metadata.number(".attention.clamp_kqv", 0.0) > 0:
        raise UnsupportedModelError(f"{file.path}: {CLIPPED}")
    return decoder_from_gguf(file, metadata, name, **NETWORK)


FAMILY = Family(
    name="olmo",
    hf_types=("olmo",),
    hf_class="OlmoForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architectures=("olmo",),
    written_as="olmo",
    config_from_gguf=config_from_gguf,
    gguf_interleaved=True,
)
