"""Tensors that are converted when they are used: equal to converted ones, converted once for each use, and not kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest

from bifolio.errors import ConfigError
from bifolio.quant.formats import QuantFormat
from bifolio.quant.late_tensor import LateTensor
from bifolio.quant.tensor import QuantizedTensor

pytestmark = pytest.mark.quick
SHAPE = (6, 64)
Use = Callable[[QuantizedTensor], np.ndarray]


class Conversions:
    """Counts conversions, and knows whether a converted array is alive."""

    def __init__(self) -> None:
        self.whole = QuantizedTensor.quantize(np.random.default_rng(0).standard_normal(SHAPE), QuantFormat.Q8_0)
        self.found: list[weakref.ref[np.ndarray]] = []
        self.late = LateTensor(QuantFormat.Q8_0, SHAPE, "late", np.zeros((3, 5), np.uint8), self.convert)

    def convert(self) -> np.ndarray:
        data = self.whole.data.copy()
        self.found.append(weakref.ref(data))
        return data

    @property
    def num_alive(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self.found)


USES: dict[str, Use] = {
    "data": lambda tensor: tensor.data,
    "floats": lambda tensor: tensor.dequantize(),
    "some rows": lambda tensor: tensor.dequantize_rows(np.array([3, 0])),
    "a block": lambda tensor: tensor.dequantize_block(5),
    "a product": lambda tensor: tensor.matmul(np.ones((2, SHAPE[1]), np.float32)),
    "another format": lambda tensor: tensor.converted(QuantFormat.F16).data,
    "chosen rows": lambda tensor: tensor.select_rows(np.array([5, 2, 2])).data,
    "a slice of rows": lambda tensor: tensor.select_rows(slice(1, 5, 2)).data,
    "columns": lambda tensor: tensor.select_columns(32, 64).data,
    "another shape": lambda tensor: tensor.reshape(3, 2, 64).data,
    "parts of parts": lambda tensor: tensor.select_rows(slice(2, 6)).select_columns(0, 32).reshape(2, 2, 32).data,
}


@pytest.mark.parametrize("use", USES)
def test_each_use_converts_once_and_keeps_nothing(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bifolio.quant.tensor.PANEL_ROWS", 2)  # several panels
    conversions = Conversions()
    np.testing.assert_array_equal(USES[use](conversions.late), USES[use](conversions.whole))
    assert len(conversions.found) == 1
    assert conversions.num_alive == 0


def test_sizes_and_parts_are_known_without_conversion() -> None:
    conversions = Conversions()
    late, whole = conversions.late, conversions.whole
    for name in ("nbytes", "num_rows", "num_blocks", "size", "memory_ratio"):
        assert getattr(late, name) == getattr(whole, name)
    parts = [late.select_rows(slice(1, 99)), late.select_columns(0, 32), late.reshape(2, 3, 64)]
    assert [part.shape for part in parts] == [(5, 64), (6, 32), (2, 3, 64)]
    assert all(part.stored is late.stored for part in parts)
    with pytest.raises(ConfigError, match="borders of blocks"):
        late.select_columns(0, 5)
    with pytest.raises(ConfigError, match="cannot be reshaped"):
        late.reshape(7, 64)
    assert not conversions.found


def test_a_held_tensor_is_converted_once() -> None:
    conversions = Conversions()
    held = conversions.late.held()
    np.testing.assert_array_equal(held.dequantize(), conversions.whole.dequantize())
    assert held.data is held.data
    assert held.held() is held
    assert (held.name, len(conversions.found)) == ("late", 1)
