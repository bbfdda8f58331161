"""InternLM3: Llama with biases of its own names. Its GGUF files have the architecture `llama`."""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    bias = bool(raw.get("bias", False))
    scaling = raw.get("rope_scaling") or {}
    if scaling.get("rope_type", scaling.get("type")) == "dynamic":  # plain rope up to `max_position_embeddings`
        raw = {**raw, "rope_scaling": None}
    return decoder_from_hf(raw, name, qkv_bias=bool(raw.get("qkv_bias", False)), output_bias=bias, mlp_bias=bias)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {**decoder_to_hf(config), "qkv_bias": config.qkv_bias, "bias": config.output_bias}


FAMILY = Family(
    name="internlm3",
    hf_types=("internlm3",),
    hf_class="InternLM3ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    written_as="llama",
    gguf_interleaved=True,
)
