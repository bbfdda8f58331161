"""An opened model: its headers are parsed and checked; no tensor is read.

open_model(reference) -> ModelFile
    .text     TextModel: configuration, tokenizer, chat template, defaults
    .views()  every tensor of the network as a view of the file, for listings and memory plans
    .load()   LoadedModel: the views by role; only norms and biases are decoded

Weights of quantised folders (FP8, AWQ, GPTQ) are no views but `LateTensor`s, which a kernel set converts one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bifolio.model.loaded import LoadedModel, TextModel
from bifolio.model.tensor_names import TensorNames, assemble, network_tensors
from bifolio.model.vision.tower import Tower
from bifolio.quant.formats import Floats, QuantFormat
from bifolio.quant.tensor import QuantizedTensor

Factors = NDArray[np.float32]  # of the rows of a matrix: f32[rows]


class TensorSource(Protocol):
    """The tensors of the files of one model."""

    def has(self, name: str) -> bool:
        """Whether the files have a tensor of this name."""
        ...

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        """The tensor in the format of the file; ModelFileError if it is missing or has another shape."""
        ...


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file or folder whose headers have been checked."""

    text: TextModel
    names: TensorNames
    source: TensorSource
    factors: Callable[[str], Factors | None] = lambda name: None  # of a matrix's rows, put into it at load
    tower: Callable[[], Tower | None] = lambda: None  # of a model that reads images

    def views(self) -> list[QuantizedTensor]:
        """Every tensor of the network once, as a view of the file."""
        return [self.source.view(name, shape) for name, shape in network_tensors(self.text.config, self.names).items()]

    def load(self) -> LoadedModel:
        """Assemble the weights by role."""
        text = self.text
        return LoadedModel(
            text.path,
            text.config,
            text.tokenizer_source,
            text.generation_config,
            text.chat_template,
            text.special_tokens,
            text.vision,
            weights=assemble(text.config, self.names, self.matrix, self.vector),
            tower=self.tower(),
        )

    def matrix(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        """A matrix [out, in] by name."""
        factors = self.factors(name)
        if factors is not None:
            stored = self.source.view(name, shape)
            scaled = QuantizedTensor.from_array(stored.dequantize() * factors[:, None])
            return scaled.converted(QuantFormat.F32 if stored.format.is_quantized else stored.format, name)
        if self.names.is_transposed(name, shape):
            return self.source.view(name, shape[::-1]).transposed()
        return self.source.view(name, shape)

    def vector(self, name: str, shape: tuple[int, ...]) -> Floats:
        """The decoded values of a norm or bias by name."""
        return self.source.view(name, shape).dequantize()
