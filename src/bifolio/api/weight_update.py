"""New weights for a model that runs: from a folder, or from named tensors as a trainer has them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bifolio.api.weight_delta import WeightDelta, read_delta
from bifolio.errors import ConfigError
from bifolio.model.digests import model_digest
from bifolio.model.huggingface.hf_loader import folder_tensors, read_json
from bifolio.model.huggingface.safetensors_file import write_safetensors
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model
from bifolio.quant.tensor import QuantizedTensor

Source: TypeAlias = str | Path | Iterable[tuple[str, Any]]  # a folder, a delta, or (name in the files, tensor)


def updated_model(model: LoadedModel, source: Source) -> LoadedModel:
    """The model with other weights of the same network; tensors that are not named stay as they are."""
    if isinstance(source, str | Path):
        if Path(source).suffix == ".safetensors" and Path(source).is_file():
            return _with_delta(model, read_delta(Path(source)))
        found = load_model(str(source))
        found = replace(found, exchanged=_tensors_of(found) if (found.path / "config.json").is_file() else {})
    else:
        found = _with_tensors(model, dict(source))
    if found.config != model.config:
        raise ConfigError(
            f"the new weights are of another network than {model.path.name}: pass weights of the same network"
        )
    return replace(model, weights=found.weights, exchanged=found.exchanged, digest_source=None)


def _with_delta(model: LoadedModel, delta: WeightDelta) -> LoadedModel:
    """The model with changed elements; both digests are checked."""
    known = model_digest(model, whole=True)
    if known != delta.base:
        raise ConfigError(
            f"the delta is for weights with the digest {delta.base}, and {model.path.name} has {known}: "
            "load the folder before it, or make the delta from the weights that are loaded"
        )
    found = _with_tensors(model, delta.applied(_tensors_of(model)))
    if model_digest(found, whole=True) != delta.result:
        raise ConfigError("the weights with this delta differ from those it was made for: load their folder")
    return replace(model, weights=found.weights, exchanged=found.exchanged, digest_source=None)


def _tensors_of(model: LoadedModel) -> Mapping[str, QuantizedTensor]:
    """The tensors of the weights by their names in the files."""
    if model.exchanged is not None:
        return model.exchanged
    found: Mapping[str, QuantizedTensor] = folder_tensors(model.path, read_json(model.path / "config.json"))
    return found


def _with_tensors(model: LoadedModel, named: dict[str, Any]) -> LoadedModel:
    """The model's folder with some tensors exchanged, written and mapped again."""
    if not (model.path / "config.json").is_file():
        raise ConfigError(
            f"{model.path.name} is no folder with config.json, so names of tensors have no meaning: load the folder "
            "that is trained, or pass a folder with the new weights"
        )
    tensors: dict[str, Any] = dict(_tensors_of(model))
    for name, value in named.items():
        known = tensors.get(name)
        if known is None:
            raise ConfigError(f"{model.path.name} has no tensor {name!r}: pass the names of its files")
        found = _tensor(value)
        if tuple(found.shape) != tuple(known.shape):
            shapes = f"{tuple(found.shape)} and not {tuple(known.shape)}"
            raise ConfigError(f"{name} has the shape {shapes}: pass the whole tensor")
        tensors[name] = found
    with tempfile.TemporaryDirectory(prefix="bifolio-weights-") as folder:  # mapped files stay readable
        for file in model.path.glob("*.json"):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, folder)
        write_safetensors(Path(folder) / "model.safetensors", tensors, {"format": "pt"})
        found_model = load_model(folder)
        return replace(found_model, exchanged=_tensors_of(found_model))


def _tensor(value: Any) -> QuantizedTensor:
    if isinstance(value, QuantizedTensor):
        return value
    if isinstance(value, np.ndarray):
        return QuantizedTensor.from_array(value)
    from bifolio.api.language_parameters import file_tensor

    found = file_tensor(value)
    return found if isinstance(found, QuantizedTensor) else QuantizedTensor.from_array(found)
