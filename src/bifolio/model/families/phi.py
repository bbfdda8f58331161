"""Phi-1, Phi-1.5 and Phi-2: attention and MLP side by side on one layer norm, biases everywhere, logits included.

The MLP has no gate; rope turns a part of each head.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.families.glm import gguf_source
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, write_activation
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

NETWORK: dict[str, Any] = {"norm": "layer", "gated_mlp": False, "parallel_block": True}
BIASES: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "head_bias": True}
DEFAULTS = {"hidden_act": "gelu_new", "intermediate_size": 8192, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5,
            "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    if raw.get("qk_layernorm"):
        raise UnsupportedModelError("Phi models whose heads have layer norms of their own are not supported")
    return decoder_from_hf(raw, name, norm_eps=float(raw["layer_norm_eps"]), **NETWORK, **BIASES)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "layer_norm_eps": config.norm_eps,
        "hidden_act": write_activation(config, "gelu_new"),
        "partial_rotary_factor": config.ropes[0].rotary_dim / config.head_dim,
    }


FAMILY = Family(
    name="phi",
    hf_types=("phi",),
    hf_class="PhiForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(
        HF_LLAMA, output="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2", final_norm="model.final_layernorm"
    ),
    gguf_architectures=("phi2",),
    written_as="phi2",
    config_from_gguf=partial(decoder_from_gguf, activation="gelu_tanh", **NETWORK),
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
    gguf_source=gguf_source,
    gguf_activation="gelu_tanh",
)
