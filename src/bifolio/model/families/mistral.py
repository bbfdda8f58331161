"""Mistral: Llama with a sliding window on every layer. Its GGUF files have the architecture `llama`."""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.huggingface.decoder_config import decoder_to_hf, largest_window


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {**decoder_to_hf(config), "sliding_window": largest_window(config)}


FAMILY = Family(
    name="mistral",
    hf_types=("mistral",),
    hf_class="MistralForCausalLM",
    config_to_hf=config_to_hf,
    written_as="llama",
    gguf_interleaved=True,
)
