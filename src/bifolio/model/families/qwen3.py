"""Qwen3: norms on each query and key head; the windows of Qwen2."""

from __future__ import annotations

from functools import partial
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.families.qwen2 import read_windows, write_windows
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    return decoder_from_hf(raw, name, qk_norm=True, layer_window=read_windows(raw))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {**decoder_to_hf(config), "attention_bias": config.qkv_bias, **write_windows(config)}


FAMILY = Family(
    name="qwen3",
    hf_types=("qwen3",),
    hf_class="Qwen3ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    gguf_architectures=("qwen3",),
    written_as="qwen3",
    config_from_gguf=partial(decoder_from_gguf, qk_norm=True),
)
