"""Nemotron-4 and Minitron: layer norms, an ungated MLP of squared ReLU, rope on a part of each head.

Folders store the weights of norms minus one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, write_activation
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

NETWORK: dict[str, Any] = {"norm": "layer", "gated_mlp": False}
NORM_OFFSET = 1.0
DEFAULTS = {"hidden_act": "relu2", "max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
            "bos_token_id": 2, "eos_token_id": 3}  # fmt: skip


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    return decoder_from_hf(raw, name, norm_eps=float(raw["norm_eps"]), norm_offset=NORM_OFFSET, **NETWORK)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "norm_eps": config.norm_eps,
        "hidden_act": write_activation(config, "relu2"),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "partial_rotary_factor": config.ropes[0].rotary_dim / config.head_dim,
    }


FAMILY = Family(
    name="nemotron",
    hf_types=("nemotron",),
    hf_class="NemotronForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(HF_LLAMA, up=("mlp.up_proj",)),
    norm_offset=NORM_OFFSET,
    gguf_architectures=("nemotron",),
    written_as="nemotron",
    config_from_gguf=partial(decoder_from_gguf, activation="relu2", **NETWORK),
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
    gguf_activation="relu2",
)
