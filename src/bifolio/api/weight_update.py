"""New weights for a model that runs: from a folder, or from named tensors as a trainer has them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from bifolio.errors import ConfigError
from bifolio.model.huggingface.hf_loader import folder_tensors, read_json
from bifolio.model.huggingface.safetensors_file import write_safetensors
from bifolio.model.loaded import LoadedModel
from bifolio.model.loader import load_model
from bifolio.quant.tensor import QuantizedTensor

Source: TypeAlias = str | Path | Iterable[tuple[str, Any]]  # a folder, or (name in the files, tensor or array)


def updated_model(model: LoadedModel, source: Source) -> LoadedModel:
    """The model with other weights of the same network; tensors that are not named stay as they are."""
    is_folder = isinstance(source, str | Path)
    found = load_model(str(source)) if is_folder else _with_tensors(model, dict(source))  # type: ignore[arg-type]
    if found.config != model.config:
        raise ConfigError(
            f"the new weights are of another network than {model.path.name}: pass weights of the same network"
        )
    return replace(model, weights=found.weights, digest_source=None)


def _with_tensors(model: LoadedModel, named: dict[str, Any]) -> LoadedModel:
    """The model's folder with some tensors exchanged, written and mapped again."""
    if not (model.path / "config.json").is_file():
        raise ConfigError(
            f"{model.path.name} is no folder with config.json, so names of tensors have no meaning: load the folder "
            "that is trained, or pass a folder with the new weights"
        )
    raw = read_json(model.path / "config.json")
    tensors: dict[str, Any] = dict(folder_tensors(model.path, raw))
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
        return load_model(folder)


def _tensor(value: Any) -> QuantizedTensor:
    if isinstance(value, QuantizedTensor):
        return value
    if isinstance(value, np.ndarray):
        return QuantizedTensor.from_array(value)
    from bifolio.api.language_parameters import file_tensor

    found = file_tensor(value)
    return found if isinstance(found, QuantizedTensor) else QuantizedTensor.from_array(found)
