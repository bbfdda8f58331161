"""Granite 3 with experts in place of the MLPs; `granitemoeshared` has a shared MLP beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, MoeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families import granite
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import Raw, expert_count
from bifolio.model.tensor_names import HF_LLAMA

DEFAULTS = {"num_local_experts": 8, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2}
SHARED = "granitemoeshared"
HF_NAMES = replace(
    HF_LLAMA,
    shared_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
    router="block_sparse_moe.router.layer",
    expert_up=("block_sparse_moe.input_linear",),
    expert_down="block_sparse_moe.output_linear",
)


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    moe = MoeConfig(
        num_experts=expert_count(raw),
        top_k=int(raw["num_experts_per_tok"]),
        expert_size=int(raw["intermediate_size"]),
        renormalise=True,
        shared_size=int(raw.get("shared_intermediate_size") or 0) if raw["model_type"] == SHARED else 0,
    )
    return replace(granite.config_from_hf(raw, name), mlp_bias=False, layer_window=(), moe=moe)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    if moe is None:
        raise UnsupportedModelError("a folder of this family describes experts")
    fields = granite.config_to_hf(config) | {
        "intermediate_size": moe.expert_size,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
    }
    if not moe.shared_size:
        return fields
    own = {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": SHARED}
    return fields | own | {"shared_intermediate_size": moe.shared_size}


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    """The architecture implies that the weights of the chosen experts add up to 1."""
    moe = experts_from_gguf(file, metadata, renormalise=True)
    if moe is None:
        raise UnsupportedModelError(f"{file.path}: files of this architecture without experts are not supported")
    return replace(granite.config_from_gguf(file, metadata, name), moe=moe)


FAMILY = Family(
    name="granitemoe",
    hf_types=("granitemoe", SHARED),
    hf_class="GraniteMoeForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=HF_NAMES,
    gguf_architectures=("granitemoe",),
    written_as="granitemoe",
    config_from_gguf=config_from_gguf,
    gguf_interleaved=True,
    gguf_entries=granite.gguf_entries,
)
