"""Mixtral: Mistral with experts. Its GGUF files have the architecture `llama`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, MoeConfig
from bifolio.model.families.family import Family
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    expert_count,
    largest_window,
)
from bifolio.model.tensor_names import HF_LLAMA


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    moe = MoeConfig(
        num_experts=expert_count(raw),
        top_k=int(raw.get("num_experts_per_tok", 2)),
        expert_size=int(raw["intermediate_size"]),
        renormalise=True,
    )
    return decoder_from_hf(raw, name, moe=moe)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    experts = {} if moe is None else {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k}
    return {**decoder_to_hf(config), "sliding_window": largest_window(config), **experts}


FAMILY = Family(
    name="mixtral",
    hf_types=("mixtral",),
    hf_class="MixtralForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(
        HF_LLAMA,
        router="block_sparse_moe.gate",
        expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
    written_as="llama",
    gguf_interleaved=True,
)
