"""Dense matrices that become blocks of a format when a kernel set takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.quant.formats import QuantFormat
from bifolio.quant.late_tensor import LateTensor
from bifolio.quant.tensor import QuantizedTensor

Round = Callable[[QuantizedTensor, QuantFormat], QuantizedTensor]


class RoundedTensor(LateTensor):
    """A matrix in `format`, rounded from a dense one at each access to `data`.

    Rows, and columns between borders of blocks, are chosen before they are rounded; the values are the same.
    """

    __slots__ = ("_round", "dense")
    dense: QuantizedTensor
    _round: Round

    def __init__(self, dense: QuantizedTensor, format: QuantFormat, round: Round) -> None:
        super().__init__(format, dense.shape, dense.name, dense.stored, lambda: round(dense.held(), format).data)
        object.__setattr__(self, "dense", dense)
        object.__setattr__(self, "_round", round)

    def select_rows(self, rows: slice | NDArray[np.integer[Any]]) -> QuantizedTensor:
        return RoundedTensor(self.dense.select_rows(rows), self.format, self._round)

    def select_columns(self, start: int, stop: int) -> QuantizedTensor:
        self.check_columns(start, stop)
        return RoundedTensor(self.dense.select_columns(start, stop), self.format, self._round)
