"""The places of a file's rows in a network, found by assembling the network from tensors that know their rows.

An adapter changes tensors of a file: those of Hugging Face folders, or of GGUF files. Families join, split and reorder
the rows of their files; the same functions carry the rows of an adapter to their places. Values are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.kernels.interface import Linear
from bifolio.model.export import row_orders
from bifolio.model.families import Family, family_of
from bifolio.model.tensor_names import TensorNames, assemble
from bifolio.model.weights import LayerWeights, ModelWeights
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

Side = Literal["hf", "gguf"]


class TracedTensor(QuantizedTensor):
    """A tensor without values, whose rows know their numbers in the file."""

    __slots__ = ("rows", "whole")
    rows: NDArray[np.int64]  # i64[rows]  numbers in the tensor of the file
    whole: tuple[int, ...]  # shape in the file

    def __init__(self, name: str, shape: tuple[int, ...], rows: NDArray[np.int64], whole: tuple[int, ...]) -> None:
        values = {"format": QuantFormat.F32, "shape": shape, "name": name, "rows": rows, "whole": whole}
        for field, value in values.items():
            object.__setattr__(self, field, value)

    @property
    def data(self) -> Any:
        raise UnsupportedModelError(f"the values of {self.name!r} are rearranged, not its rows alone")

    def select_rows(self, rows: slice | NDArray[np.integer[Any]]) -> QuantizedTensor:
        own = self.rows[rows]
        return TracedTensor(self.name, (len(own), self.shape[-1]), own, self.whole)

    def reshape(self, *shape: int) -> QuantizedTensor:
        self.check_reshape(shape)
        if self._rows_of(shape) != len(self.rows):
            raise UnsupportedModelError(f"the rows of {self.name!r} are not kept")
        return TracedTensor(self.name, shape, self.rows, self.whole)


@dataclass(frozen=True, slots=True)
class TracedFile:
    """A file that has every tensor that is asked for."""

    optional: Callable[[str], bool]

    def has(self, name: str) -> bool:
        return self.optional(name)

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        count = int(np.prod(shape[:-1], dtype=np.int64))
        return TracedTensor(name, shape, np.arange(count, dtype=np.int64), shape)


def traced_layers(config: ModelConfig, side: Side) -> tuple[LayerWeights, ...]:
    """The layers of a network, with traced tensors of files of one side in the order of the network's own rows."""
    family = family_of(config)
    interleaved = family.hf_interleaved if side == "hf" else family.gguf_interleaved
    tiled = side == "gguf" and family.gguf_tiled
    recurrent = config.recurrent
    if recurrent is not None and recurrent.kind == "delta" and recurrent.tiled != tiled:
        raise UnsupportedModelError(
            f"the heads of recurrent layers lie in another order in the base than in this adapter of a {family.name} "
            "model: use a base in the form that the adapter was trained on"
        )
    weights = _trace(replace(config, rope_interleaved=interleaved), family, side)
    if interleaved == config.rope_interleaved or not config.ropes:
        return weights.layers
    return tuple(_reordered(layer, weights.config, not interleaved) for layer in weights.layers)


def _trace(config: ModelConfig, family: Family, side: Side) -> ModelWeights:
    names: TensorNames = family.hf_names if side == "hf" else family.gguf_names
    source = (family.folder_source if side == "hf" else family.gguf_source)(TracedFile(lambda name: False), config)

    def fetch(name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        try:
            return source.view(name, shape)
        except UnsupportedModelError:  # rearranged in another way than by rows: no adapter names it
            return TracedTensor("", shape, np.arange(int(np.prod(shape[:-1])), dtype=np.int64), shape)

    return assemble(config, names, fetch, lambda name, shape: np.ones(shape, np.float32))


def _reordered(layer: LayerWeights, config: ModelConfig, to_interleaved: bool) -> LayerWeights:
    """Queries and keys in the other order of rotated pairs."""
    if not layer.qkv.parts:
        return layer
    orders = row_orders(config, to_interleaved=to_interleaved, num_parts=len(layer.qkv.parts))
    parts = tuple(
        part if order is None else part.select_rows(order) for part, order in zip(layer.qkv.parts, orders, strict=True)
    )
    return replace(layer, qkv=Linear(parts, layer.qkv.biases))
