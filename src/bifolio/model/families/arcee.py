"""Arcee (AFM): Llama with an ungated MLP of squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, write_activation
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 128000,
            "eos_token_id": 128001}  # fmt: skip


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    return decoder_from_hf({**DEFAULTS, **raw}, name, gated_mlp=False)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "hidden_act": write_activation(config, "relu2"),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


FAMILY = Family(
    name="arcee",
    hf_types=("arcee",),
    hf_class="ArceeForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(HF_LLAMA, up=("mlp.up_proj",)),
    gguf_architectures=("arcee",),
    written_as="arcee",
    config_from_gguf=partial(decoder_from_gguf, activation="relu2", gated_mlp=False),
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
    gguf_interleaved=True,
    gguf_activation="relu2",
)
