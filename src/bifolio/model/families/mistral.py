"""Mistral: Llama with a sliding window on every layer. Its GGUF files have the architecture `llama`."""

from __future__ import annotations

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family


def folder_family(config: ModelConfig) -> str:
    """The family whose folders describe a network of the architecture `llama`."""
    windows = {layer.window for layer in config.layers}
    family = "llama" if windows == {None} else "ministral" if None in windows else "mistral"
    return family if config.moe is None else "mixtral"


FAMILY = Family(
    name="mistral",
    hf_types=("mistral",),
    hf_class="MistralForCausalLM",
    hf_always=("sliding_window",),
    written_as="llama",
    gguf_interleaved=True,
)
