"""Hunyuan (dense): Llama with norms on each query and key head after rope, whose base `alpha` stretches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf
from bifolio.model.tensor_names import HF_LLAMA

NETWORK: dict[str, Any] = {"qk_norm": True, "qk_norm_after_rope": True}
HF_NAMES = replace(HF_LLAMA, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {"rms_norm_eps": 1e-5, **raw}
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    alpha = parameters.get("alpha")
    if not alpha:
        return decoder_from_hf(raw, name, **NETWORK)
    plain = {key: value for key, value in raw.items() if key not in ("rope_parameters", "rope_scaling")}
    config = decoder_from_hf(plain, name, **NETWORK)
    dim = config.head_dim
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0) * float(alpha) ** (dim / (dim - 2))
    return replace(config, ropes=(replace(config.ropes[0], theta=theta),))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {**decoder_to_hf(config), "attention_bias": config.qkv_bias}


FAMILY = Family(
    name="hunyuan_dense",
    hf_types=("hunyuan_v1_dense",),
    hf_class="HunYuanDenseV1ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=HF_NAMES,
    gguf_architectures=("hunyuan-dense",),
    written_as="hunyuan-dense",
    config_from_gguf=partial(decoder_from_gguf, **NETWORK),
)
