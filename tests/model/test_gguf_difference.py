"""Differences of two GGUF models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bifolio.model.gguf.difference import compare, value_statistics
from bifolio.model.gguf.reader import open_gguf
from bifolio.quant import QuantFormat, QuantizedTensor
from exotic_weights import write_llama

RNG = np.random.default_rng(0)
MATRIX = RNG.standard_normal((600, 64)).astype(np.float32)  # more rows than are decoded at a time


def test_statistics_are_those_of_the_decoded_values(tmp_path: Path) -> None:
    quantised = QuantizedTensor.quantize(MATRIX, QuantFormat.Q8_0)
    one, two = MATRIX.copy(), MATRIX.copy()
    two[599, 3] += 0.25
    first = {"same": one, "moved": one, "typed": one, "shaped": one, "gone": one}
    second = {"same": one, "moved": two, "typed": quantised, "shaped": one[:10], "new": one}
    found = compare(
        open_gguf(write_llama(tmp_path / "a.gguf", first, rank=1, text="x", only=2)),
        open_gguf(write_llama(tmp_path / "b.gguf", second, rank=1.0, text="y", other=2)),
    )
    assert {line.key: (line.old_type, line.new_type, line.old, line.new) for line in found.metadata} == {
        "llama.rank": ("u32", "f32", 1, 1.0), "llama.text": ("str", "str", "x", "y"),
        "llama.only": ("u32", None, 2, None), "llama.other": (None, "u32", None, 2),
    }  # fmt: skip
    by_name = {line.name: line for line in found.tensors}
    assert list(by_name) == ["moved", "typed", "shaped", "gone", "new"]
    assert found.num_equal == 1
    moved = by_name["moved"]
    assert moved.num_bytes == np.count_nonzero(one.view(np.uint8) != two.view(np.uint8))
    assert moved.values is not None
    assert (moved.values.num_values, moved.values.num_non_finite) == (1, 0)
    assert moved.values.largest == pytest.approx(0.25, rel=1e-6)
    assert moved.values.rms == pytest.approx(0.25 / np.sqrt(one.size), rel=1e-6)
    typed = by_name["typed"]
    error = quantised.dequantize().astype(np.float64) - one
    assert typed.num_bytes is None
    assert typed.values is not None
    assert typed.values.largest == np.abs(error).max()
    assert typed.values.rms == pytest.approx(np.sqrt(np.mean(error**2)))
    assert typed.values.old_rms == pytest.approx(np.sqrt(np.mean(one.astype(np.float64) ** 2)))
    assert (moved.exceeds(0.2), moved.exceeds(0.3), moved.exceeds(0)) == (True, False, True)
    assert typed.exceeds(1.0) is False
    assert by_name["shaped"].values is None
    assert by_name["gone"].new is None
    assert by_name["new"].old is None
    assert by_name["gone"].exceeds(1e9)


def test_values_that_are_not_finite_are_counted() -> None:
    first = np.array([[1, np.nan, np.inf, np.inf, -np.inf, 2]], np.float32)
    second = np.array([[1, np.nan, np.inf, -np.inf, 3, np.nan]], np.float32)
    found = value_statistics(QuantizedTensor.from_array(first), QuantizedTensor.from_array(second))
    assert (found.num_values, found.num_non_finite, found.largest) == (3, 3, 0.0)
