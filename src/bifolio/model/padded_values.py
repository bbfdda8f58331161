"""Value projections of networks whose values are smaller than keys: in the cache zeros stand behind the values.

file  |values of head 0|values of head 1|...        network  |values of head 0|0 ...|values of head 1|0 ...|
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.export import NamedTensor
from bifolio.model.model_file import TensorSource
from bifolio.quant.formats import Bytes
from bifolio.quant.late_tensor import LateTensor
from bifolio.quant.tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class PaddedValues:
    """The tensors of a file, with rows of zeros behind the values of each head."""

    source: TensorSource
    config: ModelConfig
    name: str  # end of the names of value projections

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        size, dim = self.config.value_size, self.config.head_dim
        if not name.endswith(self.name) or size in (0, dim):
            return self.source.view(name, shape)
        heads = shape[0] // dim
        stored = self.source.view(name, (heads * size, shape[1]))

        def padded() -> Bytes:
            rows = stored.data.reshape(heads, size, -1)
            return np.pad(rows, ((0, 0), (0, dim - size), (0, 0))).reshape(heads * dim, -1)  # zeros in every format

        return LateTensor(stored.format, shape, name, stored.stored, padded)


def without_padding(tensors: Iterator[NamedTensor], config: ModelConfig, name: str) -> Iterator[NamedTensor]:
    """The reverse of `PaddedValues`."""
    size, dim = config.value_size, config.head_dim
    for tensor in tensors:
        if not tensor.name.endswith(name) or size in (0, dim):
            yield tensor
            continue
        whole = tensor.rearranged()
        rows = np.arange(whole.shape[0]).reshape(-1, dim)[:, :size].reshape(-1)
        yield replace(tensor, tensor=whole.select_rows(rows))
