"""The tensors of a tower in a folder, under the names that all versions of transformers share."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from bifolio.errors import ModelFileError
from bifolio.kernels.interface import Linear, Norm
from bifolio.quant.formats import Floats
from bifolio.quant.tensor import QuantizedTensor

_TOWER = re.compile(
    r"^(?:model\.)?(?:vision_tower|vision_model|vision_encoder|vision_embedder|visual)\.(?:vision_model\.)?"
)


class TowerTensors:
    """Tensors by name: those of the tower begin with `tower.`, all others are without `model.`."""

    def __init__(self, tensors: Mapping[str, QuantizedTensor]) -> None:
        self._tensors = tensors
        self._spellings = {_TOWER.sub("tower.", name).removeprefix("model."): name for name in tensors}

    @property
    def has_tower(self) -> bool:
        """Whether the folder has tensors of a tower."""
        return any(name.startswith("tower.") for name in self._spellings)

    def has(self, name: str) -> bool:
        return name in self._spellings

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        if name not in self._spellings:
            raise ModelFileError(f"the tensor {name!r} is missing from the model's files: fetch the whole model again")
        tensor = self._tensors[self._spellings[name]]
        if tensor.shape != shape:
            raise ModelFileError(
                f"the tensor {name!r} has shape {tuple(tensor.shape)} where config.json implies {shape}: "
                "the files do not belong together"
            )
        return tensor

    def array(self, name: str, shape: tuple[int, ...]) -> Floats:
        """The decoded values of a tensor."""
        return self.view(name, shape).dequantize()

    def linear(self, *names: str, rows: int, columns: int) -> Linear:
        """Matrices [rows, columns] of the same input, with biases where the folder has them."""
        parts = tuple(self.view(f"{name}.weight", (rows, columns)) for name in names)
        biases = tuple(self.array(f"{name}.bias", (rows,)) if self.has(f"{name}.bias") else None for name in names)
        return Linear(parts, biases)

    def norm(self, name: str, size: int, eps: float, *, centered: bool = False, offset: float = 0.0) -> Norm:
        """An RMS norm, or a layer norm with a bias."""
        weight = (self.array(f"{name}.weight", (size,)) + np.float32(offset)).astype(np.float32)
        return Norm(weight, self.array(f"{name}.bias", (size,)) if centered else None, eps, centered)

    def patches(self, name: str, rows: int, columns: int, shape: tuple[int, ...]) -> Linear:
        """A convolution over patches as a product with their values."""
        weight = self.array(f"{name}.weight", shape).reshape(rows, columns)
        return Linear((weight,), (self.array(f"{name}.bias", (rows,)) if self.has(f"{name}.bias") else None,))
