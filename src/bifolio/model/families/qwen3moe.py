"""Qwen3 with experts in place of the MLPs, such as Qwen3-30B-A3B."""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig, MoeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.families.qwen2 import read_windows, write_windows
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, expert_count


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    step, plain = int(raw.get("decoder_sparse_step", 1)), raw.get("mlp_only_layers") or []
    layers = range(int(raw["num_hidden_layers"]))
    moe = MoeConfig(
        num_experts=expert_count(raw),
        top_k=int(raw["num_experts_per_tok"]),
        expert_size=int(raw["moe_intermediate_size"]),
        renormalise=bool(raw.get("norm_topk_prob", False)),
        dense_layers=tuple(layer for layer in layers if layer in plain or (layer + 1) % step),
    )
    return decoder_from_hf(raw, name, qk_norm=True, layer_window=read_windows(raw), moe=moe)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    experts = {} if moe is None else {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "norm_topk_prob": moe.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(moe.dense_layers),
    }  # fmt: skip
    return {**decoder_to_hf(config), "attention_bias": config.qkv_bias, **write_windows(config), **experts}


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    """The architecture implies that the weights of the chosen experts add up to 1."""
    moe = experts_from_gguf(file, metadata, renormalise=True)
    return decoder_from_gguf(file, metadata, name, qk_norm=True, moe=moe)


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    if config.moe is not None and not config.moe.renormalise:
        raise UnsupportedModelError("GGUF cannot describe a qwen3moe model whose chosen experts do not add up to 1")
    return {}


FAMILY = Family(
    name="qwen3moe",
    hf_types=("qwen3_moe",),
    hf_class="Qwen3MoeForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architectures=("qwen3moe",),
    written_as="qwen3moe",
    config_from_gguf=config_from_gguf,
    gguf_entries=gguf_entries,
)
