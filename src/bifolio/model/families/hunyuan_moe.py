"""Hunyuan with experts (Hunyuan-A13B): the attention of Hunyuan, experts beside a shared MLP of the same width."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, MoeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families import hunyuan_dense
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import Raw, expert_count

DEFAULTS = {"num_experts": 1, "moe_topk": 1, "bos_token_id": 1, "eos_token_id": 2}
NEEDED = {"use_cla": False, "use_qk_norm": True, "use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0,
          "mlp_bias": False, "num_shared_expert": 1}  # fmt: skip


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    for field, needed in NEEDED.items():
        if of_all_layers(raw.get(field, needed), field) != needed:
            raise UnsupportedModelError(f"Hunyuan with experts is supported with {field} = {needed} only")
    size = int(of_all_layers(raw["intermediate_size"], "intermediate_size"))
    if of_all_layers(raw.get("moe_intermediate_size") or size, "moe_intermediate_size") != size:
        raise UnsupportedModelError("Hunyuan with experts of another width than the shared MLP is not supported")
    moe = MoeConfig(
        num_experts=expert_count(raw),
        top_k=int(of_all_layers(raw["moe_topk"], "moe_topk")),
        expert_size=size,
        renormalise=True,
        shared_size=size,
    )
    return replace(hunyuan_dense.config_from_hf(raw, name), moe=moe)


def of_all_layers(value: Any, field: str) -> Any:
    """A value that config.json may name once for each layer."""
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise UnsupportedModelError(f"Hunyuan with different values of {field} by layer is not supported")
    return value[0]


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None or not moe.expert_size == moe.shared_size == config.intermediate_size:
        raise UnsupportedModelError("a folder of this family describes experts as wide as the shared MLP")
    return {**hunyuan_dense.config_to_hf(config), "num_experts": moe.num_experts, "moe_topk": moe.top_k}


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    """The architecture implies that the weights of the chosen experts add up to 1."""
    moe = experts_from_gguf(file, metadata, renormalise=True)
    return decoder_from_gguf(file, metadata, name, moe=moe, **hunyuan_dense.NETWORK)


FAMILY = Family(
    name="hunyuan_moe",
    hf_types=("hunyuan_v1_moe",),
    hf_class="HunYuanMoEV1ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(
        hunyuan_dense.HF_NAMES,
        router="mlp.gate.wg",
        shared_up=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
        shared_down="mlp.shared_mlp.down_proj",
    ),
    gguf_architectures=("hunyuan-moe",),
    written_as="hunyuan-moe",
    config_from_gguf=config_from_gguf,
)
