"""Gemma 1 and CodeGemma: Llama with scaled embeddings, norm weights stored minus one, and a GELU in the MLP."""

from __future__ import annotations

import math
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.families.gemma3 import NORM_OFFSET
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    read_activation,
    write_activation,
)

ACTIVATION = "gelu_pytorch_tanh"
DEFAULTS = {"head_dim": 256, "num_key_value_heads": 16, "hidden_act": ACTIVATION, "max_position_embeddings": 8192,
            "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1}  # fmt: skip


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    if raw.get("use_bidirectional_attention"):
        raise UnsupportedModelError("Gemma models whose tokens attend to later ones are not supported")
    return decoder_from_hf(
        raw,
        name,
        activation=read_activation(ACTIVATION if raw["hidden_act"] == "gelu" else raw["hidden_act"]),
        norm_offset=NORM_OFFSET,
        mlp_bias=False,
        layer_window=(),
        embedding_scale=math.sqrt(int(raw["hidden_size"])),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "hidden_act": write_activation(config, ACTIVATION),
        "attention_bias": config.qkv_bias,
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    scale = math.sqrt(metadata.count(".embedding_length"))
    return decoder_from_gguf(file, metadata, name, activation="gelu_tanh", embedding_scale=scale)


FAMILY = Family(
    name="gemma",
    hf_types=("gemma",),
    hf_class="GemmaForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    norm_offset=NORM_OFFSET,
    gguf_architectures=("gemma",),
    written_as="gemma",
    config_from_gguf=config_from_gguf,
    gguf_activation="gelu_tanh",
)
