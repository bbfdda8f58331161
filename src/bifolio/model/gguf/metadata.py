"""`ModelConfig` → the metadata of a GGUF file, the reverse of `config_from_gguf`."""

from __future__ import annotations

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import write_network
from bifolio.model.families import family_of
from bifolio.model.gguf.reader import Value

_QUANTIZATION_VERSION = 2


def gguf_architecture(config: ModelConfig) -> str:
    """The name of the architecture in GGUF files; UnsupportedModelError if GGUF cannot describe the family."""
    family = family_of(config)
    name = family.written_with_experts if config.moe is not None and family.written_with_experts else family.written_as
    name = family.written_both_ways if config.bidirectional and family.written_both_ways else name
    if not name:
        raise UnsupportedModelError(f"GGUF files of the architecture {config.architecture!r} cannot be written")
    return name


def model_metadata(config: ModelConfig, file_type: int, name: str) -> dict[str, Value]:
    """All entries about the network, without those of the tokenizer."""
    family, architecture = family_of(config), gguf_architecture(config)
    own = {**write_network(family, config, "gguf"), **family.gguf_written}
    if config.bidirectional:
        own["attention.causal"] = False
    return {
        "general.name": name,
        "general.type": "model",
        "general.file_type": file_type,
        "general.quantization_version": _QUANTIZATION_VERSION,
        **{f"{architecture}.{key}": value for key, value in own.items()},
    }
