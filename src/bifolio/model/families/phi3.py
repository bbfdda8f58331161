"""Phi-3 and Phi-4: queries, keys and values in one matrix, gate and up in another; a window on every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.huggingface.decoder_config import decoder_to_hf, largest_window
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "sliding_window": largest_window(config),
        "pad_token_id": None,
        "partial_rotary_factor": config.ropes[0].rotary_dim / config.head_dim,
    }


FAMILY = Family(
    name="phi3",
    hf_types=("phi3",),
    hf_class="Phi3ForCausalLM",
    config_to_hf=config_to_hf,
    hf_names=replace(HF_LLAMA, qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
    gguf_architectures=("phi3",),
    written_as="phi3",
    gguf_names=replace(GGUF_LLAMA, qkv=("attn_qkv",), up=("ffn_up",)),
)
