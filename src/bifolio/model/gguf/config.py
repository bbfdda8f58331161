"""The header of a GGUF file → `ModelConfig`, by the family that its architecture names."""

from __future__ import annotations

from dataclasses import replace

from bifolio.config import ModelConfig
from bifolio.errors import ConfigError, ModelFileError, UnsupportedModelError
from bifolio.model.families import family_of_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Describe the network in the file."""
    metadata = Metadata(file.metadata, file.path)
    family = family_of_gguf(metadata.architecture, str(file.path))
    if metadata.count(".expert_count", 0):
        raise UnsupportedModelError(f"{file.path}: mixtures of experts are not supported")
    try:
        return replace(family.config_from_gguf(file, metadata, family.name), rope_interleaved=family.gguf_interleaved)
    except ConfigError as error:
        raise ModelFileError(f"{file.path}: {error}") from error
