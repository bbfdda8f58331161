"""OLMoE: experts in every layer, and norms on all query and key heads of a token together."""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig, MoeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, expert_count

NETWORK: dict[str, Any] = {"qk_norm": True, "qk_norm_all_heads": True}


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    if raw.get("clip_qkv"):
        raise UnsupportedModelError("OLMoE with clipped queries, keys and values is not supported")
    moe = MoeConfig(
        num_experts=expert_count(raw),
        top_k=int(raw["num_experts_per_tok"]),
        expert_size=int(raw["intermediate_size"]),
        renormalise=bool(raw.get("norm_topk_prob", False)),
    )
    return decoder_from_hf({"rms_norm_eps": 1e-5, **raw}, name, moe=moe, **NETWORK)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    experts = {} if moe is None else {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.renormalise,
    }  # fmt: skip
    return {**decoder_to_hf(config), "attention_bias": config.qkv_bias, **experts}


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    """The architecture implies that the weights of the chosen experts are used as they are."""
    moe = experts_from_gguf(file, metadata, renormalise=False)
    return decoder_from_gguf(file, metadata, name, moe=moe, **NETWORK)


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    if config.moe is not None and config.moe.renormalise:
        raise UnsupportedModelError("GGUF cannot describe an olmoe model whose chosen experts add up to 1")
    return {}


FAMILY = Family(
    name="olmoe",
    hf_types=("olmoe",),
    hf_class="OlmoeForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architectures=("olmoe",),
    written_as="olmoe",
    config_from_gguf=config_from_gguf,
    gguf_entries=gguf_entries,
)
