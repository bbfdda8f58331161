"""Folders that store the experts of a layer together, one by one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bifolio.config import ModelConfig
from bifolio.errors import ModelFileError
from bifolio.model.model_file import TensorSource
from bifolio.quant.tensor import QuantizedTensor

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True, slots=True)
class EachExpert:
    """The tensors of a folder, which may store all experts of a layer in two tensors: gate and up, and down,
    each as [experts, out, in] or as [experts, in, out]."""

    source: TensorSource
    config: ModelConfig

    def has(self, name: str) -> bool:
        return self.source.has(self._stored(name) or name)

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        stored, moe = self._stored(name), self.config.moe
        found = EXPERT.fullmatch(name)
        if stored is None or found is None or moe is None:
            return self.source.view(name, shape)
        (size, columns), halves, number = shape, 1 if found[3] == "down" else 2, int(found[2])
        half = (found[3] == "up") * size
        try:
            tensor = self.source.view(stored, (moe.num_experts, halves * size, columns))
        except ModelFileError:
            tensor = self.source.view(stored, (moe.num_experts, columns, halves * size))
            expert = tensor.select_rows(slice(number * columns, (number + 1) * columns))
            return expert.transposed().select_rows(slice(half, half + size))
        start = number * halves * size + half
        return tensor.select_rows(slice(start, start + size))

    def _stored(self, name: str) -> str | None:
        """The tensor of all experts that holds this one; None: the folder has a tensor of this name, or neither."""
        found = EXPERT.fullmatch(name)
        if found is None or self.source.has(name):
            return None
        stored = f"{found[1]}.{'down' if found[3] == 'down' else 'gate_up'}_proj"
        return stored if self.source.has(stored) else None
