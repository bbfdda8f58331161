"""The towers of GGUF models: a second file beside the text model, `mmproj`, in llama.cpp's names.

Its metadata becomes the fields that a folder would have, and its tensors get the names of a folder, so that each family
of towers is read in one way (`model.vision.families`). Missing entries have the values of the released models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from bifolio.errors import BifolioError, ModelFileError, UnsupportedModelError
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.projector_types import PROJECTORS
from bifolio.model.gguf.reader import GgufFile, open_gguf
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.model_file import ModelFile
from bifolio.model.vision.families import vision_of
from bifolio.model.vision.tensors import TowerTensors
from bifolio.model.vision.tower import Vision
from bifolio.quant.tensor import QuantizedTensor

ARCHITECTURE = "clip"


def is_projector(file: GgufFile) -> bool:
    """Whether a file holds a tower instead of a model."""
    return bool(file.metadata.get("general.architecture") == ARCHITECTURE)


def read_projector(file: GgufFile, text: ModelFile, metadata: Metadata) -> tuple[Vision, TowerTensors]:
    """How a text model takes images with this projector, and the tensors of the tower."""
    own = Metadata(file.metadata, file.path)
    if not is_projector(file):
        raise ModelFileError(f"{file.path} holds no projector but a model of type {own.architecture}: pass its mmproj")
    key = next((key for key in ("clip.vision.projector_type", "clip.projector_type") if own.has(key)), None)
    kind = own.text(key or "clip.projector_type")
    if kind not in PROJECTORS:
        raise UnsupportedModelError(
            f"{file.path}: projectors of type {kind!r} are not supported: {', '.join(PROJECTORS)} are"
        )
    projector, size = PROJECTORS[kind], text.text.config.hidden_size
    if own.count("clip.vision.projection_dim") != size:
        raise ModelFileError(
            f"{file.path} makes rows of {own.count('clip.vision.projection_dim')} numbers and {text.text.path.name} "
            f"takes {size}: the files belong to different models"
        )
    config, processor = projector.fields(file, own, metadata)
    config |= {"image_token_id": _token(projector.row_token, metadata, file.path)}
    config["text_config"] = {**config.get("text_config", {}), "hidden_size": size}
    processor |= {"image_mean": _floats(own, "image_mean"), "image_std": _floats(own, "image_std")}
    vision = vision_of(JsonObject(config, file.path), processor, file.path)
    if vision is None:
        raise UnsupportedModelError(f"{file.path}: the tower of a {kind} projector is not known")
    return vision, TowerTensors(projector.changed(dict(_renamed(file, projector.names)), own))


def with_projector(opened: ModelFile, metadata: Metadata, path: Path) -> ModelFile:
    """A text model with the tower of a projector's file."""
    vision, tensors = read_projector(open_gguf(path), opened, metadata)
    return replace(opened, text=replace(opened.text, vision=vision), tower=partial(vision.load, tensors))


def projector_beside(opened: ModelFile, metadata: Metadata) -> Path | None:
    """The projector in the folder of a text model: of those that fit it, the one with the most similar name."""
    path = opened.text.path
    fitting = []
    for each in sorted(path.parent.glob("*mmproj*.gguf")):
        try:
            read_projector(open_gguf(each), opened, metadata)
        except BifolioError:  # of another model beside this one
            continue
        fitting.append(each)

    def likeness(found: Path) -> int:
        pairs = zip(re.sub(r"mmproj-?", "", found.name), path.name, strict=False)
        return next((count for count, (one, other) in enumerate(pairs) if one != other), len(path.name))

    return max(fitting, key=likeness, default=None)


def _token(text: str, metadata: Metadata, path: Path) -> int:
    tokens = metadata.strings("tokenizer.ggml.tokens") or ()
    found = next((number for number, token in enumerate(tokens) if token == text), None)
    if found is None:
        raise ModelFileError(f"{path} needs the token {text!r}, which {metadata.path.name} lacks: pass its own mmproj")
    return found


def _floats(own: Metadata, name: str) -> list[float]:
    values = own.array(f"clip.vision.{name}")
    return [0.5] * 3 if values is None else [float(value) for value in values]


def _renamed(file: GgufFile, names: tuple[tuple[str, str], ...]) -> Iterator[tuple[str, QuantizedTensor]]:
    patterns = [(re.compile(pattern), name) for pattern, name in names]
    for entry in file.entries.values():
        if not entry.format.is_readable:
            raise UnsupportedModelError(f"{file.path}: the tensor {entry.name!r} has type {entry.format.name}")
        stem, dot, ending = entry.name.partition(".weight")
        if not dot:
            stem, dot, ending = entry.name.partition(".bias")
        found = next((match.expand(name) for p, name in patterns if (match := p.fullmatch(stem)) is not None), stem)
        yield found + dot + ending, file.tensor(entry.name)
