"""Qwen1.5-MoE and Qwen2 with experts beside a gated shared MLP, such as Qwen2-57B-A14B."""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families import qwen3next
from bifolio.model.families.family import Family
from bifolio.model.families.qwen2 import read_windows, write_windows
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf
from bifolio.model.stored_form import StoredForm, reading, writing

DEFAULTS = {"num_key_value_heads": 16, "intermediate_size": 5632, "max_position_embeddings": 32768, "num_experts": 60,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False, "sliding_window": 4096, "qkv_bias": True}  # fmt: skip


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    if raw.get("use_sliding_window") and raw.get("layer_types") is None:
        raise UnsupportedModelError("qwen2_moe with windows but without layer_types in config.json is not supported")
    return decoder_from_hf(
        raw,
        name,
        qkv_bias=bool(raw["qkv_bias"]),
        output_bias=False,
        mlp_bias=False,
        layer_window=read_windows(raw),
        moe=qwen3next.experts_from_hf(raw),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    experts = qwen3next.experts_to_hf(config)
    return {**decoder_to_hf(config), "qkv_bias": config.qkv_bias, **write_windows(config), **experts}


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    """The architecture implies that the weights of the chosen experts are used as they are."""
    moe = experts_from_gguf(file, metadata, renormalise=False, shared_gate=True)
    return decoder_from_gguf(file, metadata, name, moe=moe)


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    if config.moe is not None and config.moe.renormalise:
        raise UnsupportedModelError("GGUF cannot describe a qwen2moe model whose chosen experts add up to 1")
    return {}


def gguf_form(config: ModelConfig) -> StoredForm:
    return StoredForm(flat=("ffn_gate_inp_shexp.weight",))


FAMILY = Family(
    name="qwen2moe",
    hf_types=("qwen2_moe",),
    hf_class="Qwen2MoeForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=qwen3next.HF_NAMES,
    gguf_architectures=("qwen2moe",),
    written_as="qwen2moe",
    config_from_gguf=config_from_gguf,
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
    gguf_entries=gguf_entries,
)
