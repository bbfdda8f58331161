"""GLM-4.5 with experts: sigmoid routing with a bias, shared experts, plain MLPs in the first layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, MoeConfig
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, expert_count
from bifolio.model.next_token_names import GGUF_NEXT_TOKEN, HF_NEXT_TOKEN
from bifolio.model.tensor_names import GGUF_LLAMA

GROUP_BEST = 2  # experts that rank a group


def experts_from_hf(raw: Raw) -> MoeConfig:
    """Experts that are chosen by sigmoids and a bias, behind `first_k_dense_replace` layers with plain MLPs."""
    size = int(raw["moe_intermediate_size"])
    groups = int(raw.get("n_group") or 1)
    return MoeConfig(
        num_experts=expert_count(raw),
        top_k=int(raw["num_experts_per_tok"]),
        expert_size=size,
        scoring="sigmoid",
        renormalise=bool(raw.get("norm_topk_prob", True)),
        scale=float(raw.get("routed_scaling_factor", 1.0)),
        selection_bias=True,
        num_groups=groups,
        top_groups=int(raw.get("topk_group") or groups),
        group_best=GROUP_BEST,
        shared_size=size * int(raw.get("n_shared_experts") or 0),
        dense_layers=tuple(range(int(raw.get("first_k_dense_replace", 1)))),
    )


def experts_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    return {} if moe is None else {
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "n_shared_experts": moe.shared_size // moe.expert_size,
        "first_k_dense_replace": len(moe.dense_layers),
        "norm_topk_prob": moe.renormalise,
        "routed_scaling_factor": moe.scale,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
    }  # fmt: skip


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    qk_norm = bool(raw.get("use_qk_norm", False))
    partial = {} if "rope_parameters" in raw else {"partial_rotary_factor": raw.get("partial_rotary_factor", 0.5)}
    return decoder_from_hf({**raw, **partial}, name, output_bias=False, qk_norm=qk_norm, moe=experts_from_hf(raw))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "attention_bias": config.qkv_bias,
        "use_qk_norm": config.qk_norm,
        "partial_rotary_factor": config.ropes[0].rotary_dim / config.head_dim,
        **experts_to_hf(config),
    }


def sigmoid_experts(file: GgufFile, metadata: Metadata) -> MoeConfig | None:
    """Sigmoids choose the experts of files that do not name the function."""
    sigmoid: dict[str, Any] = {} if metadata.has(".expert_gating_func") else {"scoring": "sigmoid"}
    return experts_from_gguf(file, metadata, group_best=GROUP_BEST, **sigmoid)


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    """Layers behind the last one are heads for multi-token prediction (`model.next_token_head`)."""
    moe = sigmoid_experts(file, metadata)
    layers = metadata.count(".block_count") - metadata.count(".nextn_predict_layers", 0)
    qk_norm = "blk.0.attn_q_norm.weight" in file.entries
    return decoder_from_gguf(file, metadata, name, qk_norm=qk_norm, moe=moe, num_layers=layers)


FAMILY = Family(
    name="glm4moe",
    hf_types=("glm4_moe",),
    hf_class="Glm4MoeForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architectures=("glm4moe",),
    written_as="glm4moe",
    config_from_gguf=config_from_gguf,
    gguf_names=replace(GGUF_LLAMA, mlp_norm="post_attention_norm"),
    hf_next_token=HF_NEXT_TOKEN,
    gguf_next_token=GGUF_NEXT_TOKEN,
)
