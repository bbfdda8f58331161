"""Llama and models of the same architecture, such as SmolLM2 and TinyLlama.

GGUF files of Mixtral have this architecture, too.
"""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import decoder_to_hf


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {**decoder_to_hf(config), "attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def folder_family(config: ModelConfig) -> str:
    """Networks with windows are written as Mistral or Ministral, those with experts as Mixtral."""
    if config.moe is not None:
        return "mixtral"
    if not config.layer_window:
        return "llama"
    return "ministral" if None in config.layer_window else "mistral"


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    return decoder_from_gguf(file, metadata, name, moe=experts_from_gguf(file, metadata, renormalise=True))


def fresh_config(*, hidden_size: int, num_heads: int, **sizes: Any) -> ModelConfig:
    head_dim = hidden_size // num_heads
    return ModelConfig(
        architecture="llama",
        hidden_size=hidden_size,
        num_heads=num_heads,
        head_dim=head_dim,
        tie_embeddings=True,
        ropes=(RopeConfig(10000.0, head_dim),),
        **sizes,
    )


FAMILY = Family(
    name="llama",
    hf_types=("llama",),
    hf_class="LlamaForCausalLM",
    config_to_hf=config_to_hf,
    folder_family=folder_family,
    gguf_architectures=("llama",),
    written_as="llama",
    config_from_gguf=config_from_gguf,
    gguf_interleaved=True,
    fresh_config=fresh_config,
)
