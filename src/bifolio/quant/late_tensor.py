"""Tensors that a file holds in a form which no kernel reads: they are converted when a kernel set takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bifolio.quant.formats import Bytes, QuantFormat
from bifolio.quant.mapped import release_pages
from bifolio.quant.tensor import QuantizedTensor


class LateTensor(QuantizedTensor):
    """A tensor whose `data` is converted at each access and not kept, so that memory holds a few of them.

    `stored` are its bytes in the file. `held()` converts once, for several accesses.
    """

    __slots__ = ("_convert", "_stored")
    _convert: Callable[[], Bytes]
    _stored: Bytes

    def __init__(
        self, format: QuantFormat, shape: tuple[int, ...], name: str, stored: Bytes, convert: Callable[[], Bytes]
    ) -> None:
        values = {"format": format, "shape": shape, "name": name, "_stored": stored, "_convert": convert}
        for field, value in values.items():
            object.__setattr__(self, field, value)

    @property
    def data(self) -> Bytes:
        return self.held().data

    @property
    def stored(self) -> Bytes:
        return self._stored

    def held(self) -> QuantizedTensor:
        converted = QuantizedTensor(self.format, self._convert(), self.shape, self.name)
        release_pages(self._stored)
        return converted

    def select_rows(self, rows: slice | NDArray[np.integer[Any]]) -> QuantizedTensor:
        count = len(range(*rows.indices(self.num_rows))) if isinstance(rows, slice) else len(rows)
        return self._part((count, self.shape[-1]), lambda whole: whole.select_rows(rows))

    def select_columns(self, start: int, stop: int) -> QuantizedTensor:
        self.check_columns(start, stop)
        return self._part((self.num_rows, stop - start), lambda whole: whole.select_columns(start, stop))

    def reshape(self, *shape: int) -> QuantizedTensor:
        self.check_reshape(shape)
        return self._part(shape, lambda whole: whole.reshape(*shape))

    def _part(self, shape: tuple[int, ...], choose: Callable[[QuantizedTensor], QuantizedTensor]) -> QuantizedTensor:
        return LateTensor(self.format, shape, self.name, self._stored, lambda: choose(self.held()).data)
