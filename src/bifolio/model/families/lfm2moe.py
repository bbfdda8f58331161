"""LFM2 with experts in place of the MLPs, such as LFM2-8B-A1B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, MoeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families import lfm2
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, expert_count


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    moe = MoeConfig(
        num_experts=expert_count(raw),
        top_k=int(raw.get("num_experts_per_tok", 4)),
        expert_size=int(raw["moe_intermediate_size"]),
        scoring="sigmoid",
        renormalise=bool(raw.get("norm_topk_prob", True)),
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        selection_bias=bool(raw.get("use_expert_bias", True)),
        dense_layers=tuple(range(int(raw.get("num_dense_layers", 2)))),
    )
    return lfm2.hybrid_from_hf(raw, name, intermediate_size=int(raw["intermediate_size"]), moe=moe)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    experts = {} if moe is None else {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "norm_topk_prob": moe.renormalise,
        "routed_scaling_factor": moe.scale,
        "use_expert_bias": moe.selection_bias,
        "num_dense_layers": len(moe.dense_layers),
    }  # fmt: skip
    return lfm2.hybrid_to_hf(config) | experts


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    """The architecture implies that the weights of the chosen experts add up to 1."""
    return lfm2.hybrid_from_gguf(file, metadata, name, moe=experts_from_gguf(file, metadata, renormalise=True))


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    moe = config.moe
    if moe is None or not (moe.renormalise and moe.selection_bias):
        raise UnsupportedModelError("GGUF describes LFM2 with experts only if they have a bias and add up to 1")
    return lfm2.gguf_entries(config)


FAMILY = Family(
    name="lfm2moe",
    hf_types=("lfm2_moe",),
    hf_class="Lfm2MoeForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(
        lfm2.HF_NAMES,
        router="feed_forward.gate",
        selection_bias="feed_forward.expert_bias",
        expert_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
        expert_down="feed_forward.experts.{}.w2",
    ),
    gguf_architectures=("lfm2moe",),
    written_as="lfm2moe",
    config_from_gguf=config_from_gguf,
    gguf_names=lfm2.GGUF_NAMES,
    gguf_entries=gguf_entries,
)
