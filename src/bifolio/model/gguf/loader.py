"""A GGUF file as a `ModelFile`: weights are views of the mapped file, in its formats."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bifolio.config import MODEL_LIMITS, ModelConfig
from bifolio.errors import ConfigError, ModelFileError, UnsupportedModelError
from bifolio.model.description import read_network
from bifolio.model.families import Family, family_of, family_of_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.header import Header
from bifolio.model.gguf.pooling import read_pooling
from bifolio.model.gguf.projector import is_projector, projector_beside, with_projector
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.gguf.sampling import generation_config_from
from bifolio.model.gguf.split import open_whole_gguf
from bifolio.model.gguf.tokenizer import has_tokenizer, special_tokens, tokenizer_from_metadata
from bifolio.model.loaded import LoadedModel, TextModel
from bifolio.model.model_file import ModelFile
from bifolio.quant.tensor import QuantizedTensor


def load_gguf(path: str | Path) -> LoadedModel:
    """Load the model of a GGUF file."""
    return open_gguf_model(path).load()


def open_gguf_model(path: str | Path, mmproj: str | Path | None = None) -> ModelFile:
    """Check the header of a file, and of all files of a split model, and map them.

    `mmproj`: the file of the tower; by default the one beside the model, if there is one that fits.
    """
    file = open_whole_gguf(path)
    if is_projector(file):
        raise ModelFileError(f"{path} is the tower of a model: pass the file of the text model, and this one as mmproj")
    opened, metadata = model_of_gguf(file), Metadata(file.metadata, file.path)
    tower = projector_beside(opened, metadata) if mmproj is None else Path(mmproj).expanduser()
    return opened if tower is None else with_projector(opened, metadata, tower)


def model_of_gguf(file: GgufFile) -> ModelFile:
    """The model of a mapped file; ModelFileError if its metadata and tensors do not make one."""
    config = config_from_gguf(file)
    metadata = Metadata(file.metadata, file.path)
    template = file.metadata.get("tokenizer.chat_template")
    pooling, head = read_pooling(Header(file), config)
    text = TextModel(
        path=file.path,
        config=config,
        tokenizer_source=partial(tokenizer_from_metadata, metadata) if has_tokenizer(metadata) else None,
        generation_config=generation_config_from(file.metadata),
        chat_template=template if isinstance(template, str) else None,
        special_tokens=special_tokens(metadata, config.vocab_size),
        pooling=pooling,
    )
    family = family_of(config)
    source = family.gguf_source(GgufTensors(file), config)
    if pooling.head is None or head is None:
        return ModelFile(text, family.gguf_names, source)
    return ModelFile(text, family.gguf_names, source, pooler=partial(head.weights, config, len(pooling.head.labels)))


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Read the configuration of the network from the header."""
    header = Header(file)
    family = family_of_gguf(header.architecture, str(file.path))
    if (count := header.count(".block_count", 1)) > MODEL_LIMITS["num_layers"]:
        raise header.fail(f"{count} layers are more than any real model has")
    _check_support(family, header)
    try:
        config = read_network(family, header)
    except ConfigError as error:
        raise header.fail(str(error)) from error
    if header.count(".expert_count", 0) and config.moe is None:
        raise UnsupportedModelError(f"{file.path}: mixtures of experts of this architecture are not supported")
    return config


def _check_support(family: Family, header: Header) -> None:
    for name, reason in family.gguf_refused.items():
        if header.get(name) is not None if name.startswith(".") else header.has_tensor(name):
            raise UnsupportedModelError(f"{header.path}: {reason}")
    for key, needed in family.gguf_needed.items():
        if header.get(key) not in (None, needed):
            raise UnsupportedModelError(
                f"{header.path}: {key} is {header.get(key)}: {family.name} models are supported with {needed!r} only"
            )


@dataclass(frozen=True, slots=True)
class GgufTensors:
    """The tensors of a file, by name and shape."""

    file: GgufFile

    def has(self, name: str) -> bool:
        return name in self.file.entries

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        entry = self.file.entries.get(name)
        if entry is None:
            raise ModelFileError(f"{self.file.path}: the tensor {name!r} is missing: fetch the whole model again")
        if without_ones(entry.shape) != without_ones(shape):
            raise ModelFileError(
                f"{self.file.path}: the tensor {name!r} has shape {entry.shape} where the metadata implies {shape}"
            )
        if not entry.format.is_readable:
            raise UnsupportedModelError(
                f"{self.file.path}: the tensor {name!r} has type {entry.format.name}, which cannot be decoded: "
                "use a file in another type"
            )
        tensor = self.file.tensor(name)
        return tensor if entry.shape == shape else tensor.reshape(*shape)


def without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without leading dimensions of 1, which some programs write and others leave out."""
    return next((shape[n:] for n, size in enumerate(shape) if size != 1), ())
