"""StarCoder2: layer norms, an ungated MLP, biases everywhere, rope; some models have a window on every layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    largest_window,
    write_activation,
)
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

NETWORK: dict[str, Any] = {"norm": "layer", "gated_mlp": False}
DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True}


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    bias = bool(raw["use_bias"])
    return decoder_from_hf(
        raw,
        name,
        norm_eps=float(raw["norm_epsilon"]),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        **NETWORK,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "hidden_act": write_activation(config, "gelu_pytorch_tanh"),
        "norm_epsilon": config.norm_eps,
        "use_bias": config.qkv_bias,
        "sliding_window": largest_window(config),
    }


FAMILY = Family(
    name="starcoder2",
    hf_types=("starcoder2",),
    hf_class="Starcoder2ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(HF_LLAMA, up=("mlp.c_fc",), down="mlp.c_proj"),
    gguf_architectures=("starcoder2",),
    written_as="starcoder2",
    config_from_gguf=partial(decoder_from_gguf, activation="gelu_tanh", **NETWORK),
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
    gguf_activation="gelu_tanh",
)
