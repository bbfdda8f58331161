"""QuantizedTensor: the bounds that the specification sets, and its views."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from bifolio.errors import ConfigError, ModelFileError
from bifolio.quant import QuantFormat, QuantizedTensor
from bifolio.quant.formats import ENCODABLE_FORMATS
from bifolio.quant.tensor import PANEL_ROWS, concatenate_rows

FORMATS = list(ENCODABLE_FORMATS)
# Largest error, as a part of the largest magnitude in a block: half a step, and the rounding of the scale to fp16.
STEP = {QuantFormat.Q8_0: 1 / 127, QuantFormat.Q4_0: 1 / 8, QuantFormat.Q4_1: 2 / 15}


def weights(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * np.float32(0.05)


@pytest.mark.parametrize("format", STEP, ids=lambda format: format.name)
def test_roundtrip_error_is_at_most_half_a_step_of_its_block(format: QuantFormat) -> None:
    values = weights(64, 256)
    error = np.abs(QuantizedTensor.quantize(values, format).dequantize() - values).reshape(-1, 32)
    largest = np.abs(values).reshape(-1, 32).max(axis=1, keepdims=True)
    # Q4_0's range ends at -8 and +7 steps, so a value near the positive end can be off by a whole step.
    steps = 1.0 if format is QuantFormat.Q4_0 else 0.5
    assert (error <= largest * (STEP[format] * steps + 2**-10)).all()


def test_q8_roundtrip_within_tolerance() -> None:
    """Mean squared error under 0.1 % of the mean square, and RMS error under 1 % of the RMS."""
    values = weights(64, 256)
    error = QuantizedTensor.quantize(values, QuantFormat.Q8_0).dequantize() - values
    relative = np.mean(error**2) / np.mean(values**2)
    assert relative < 0.001
    assert np.sqrt(relative) < 0.01


@pytest.mark.parametrize("format", [QuantFormat.Q4_0, QuantFormat.Q4_1], ids=lambda format: format.name)
def test_q4_roundtrip_within_tolerance(format: QuantFormat) -> None:
    """Mean squared error under 1 % of the mean square, which is an RMS error under 10 % of the RMS."""
    values = weights(64, 256)
    error = QuantizedTensor.quantize(values, format).dequantize() - values
    relative = np.mean(error**2) / np.mean(values**2)
    assert relative < 0.01


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_quantized_matmul_matches_f32(format: QuantFormat) -> None:
    """Equal to a float64 product with the dequantised weights, over more than one panel and any leading shape."""
    tensor = QuantizedTensor.quantize(weights(PANEL_ROWS + 37, 96), format)
    x = np.random.default_rng(1).standard_normal((2, 3, 96)).astype(np.float32)
    expected = x.astype(np.float64) @ tensor.dequantize().astype(np.float64).T
    assert tensor.matmul(x).shape == (2, 3, PANEL_ROWS + 37)
    np.testing.assert_allclose(tensor.matmul(x), expected, atol=1e-5)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_dequant_block_size_correct(format: QuantFormat) -> None:
    tensor = QuantizedTensor.quantize(weights(3, 96), format)
    flat = tensor.dequantize().reshape(-1, format.block_elements)
    for index in range(0, tensor.num_blocks, 2):
        block = tensor.dequantize_block(index)
        assert block.shape == (format.block_elements,)
        assert np.array_equal(block, flat[index])
    with pytest.raises(ConfigError, match="does not exist"):
        tensor.dequantize_block(tensor.num_blocks)


@pytest.mark.parametrize(
    ("format", "ratio"),
    [(QuantFormat.Q4_0, 128 / 18), (QuantFormat.Q4_1, 6.4), (QuantFormat.Q8_0, 128 / 34), (QuantFormat.F16, 2.0)],
    ids=lambda value: getattr(value, "name", None),
)
def test_quant_memory_reduction(format: QuantFormat, ratio: float) -> None:
    tensor = QuantizedTensor.quantize(weights(8, 64), format)
    assert tensor.memory_ratio == pytest.approx(ratio)
    assert tensor.nbytes == tensor.data.nbytes == format.bytes_for((8, 64))


def test_matmul_never_holds_the_whole_matrix_as_floats() -> None:
    rows, columns = 16 * PANEL_ROWS, 256
    tensor = QuantizedTensor.quantize(weights(rows, columns), QuantFormat.Q4_0)
    x = np.ones((1, columns), np.float32)
    tracemalloc.start()
    tensor.matmul(x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < rows * columns * 4 / 3


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_rows_can_be_looked_up_selected_and_stacked(format: QuantFormat) -> None:
    tensor = QuantizedTensor.quantize(weights(10, 64), format)
    whole = tensor.dequantize()
    index = np.array([7, 0, 7])
    assert np.array_equal(tensor.dequantize_rows(index), whole[index])
    assert np.array_equal(tensor.dequantize_rows(slice(2, 5)), whole[2:5])
    assert tensor.dequantize_rows(np.array([], np.int64)).shape == (0, 64)
    assert np.array_equal(tensor.select_rows(index).dequantize(), whole[index])
    assert np.shares_memory(tensor.select_rows(slice(0, 4)).data, tensor.data)
    stacked = concatenate_rows([tensor.select_rows(slice(0, 4)), tensor.select_rows(slice(4, 10))])
    assert np.array_equal(stacked.dequantize(), whole)


@pytest.mark.parametrize("format", [QuantFormat.F32, QuantFormat.F16, QuantFormat.BF16], ids=lambda f: f.name)
def test_dense_tensors_transpose_and_reshape(format: QuantFormat) -> None:
    tensor = QuantizedTensor.quantize(weights(6, 10), format)
    assert np.array_equal(tensor.transposed().dequantize(), tensor.dequantize().T)
    assert np.array_equal(tensor.reshape(3, 20).dequantize(), tensor.dequantize().reshape(3, 20))
    vector = QuantizedTensor.quantize(weights(1, 10)[0], format)
    assert vector.dequantize().shape == (10,)
    assert QuantizedTensor.quantize(np.float32(2.5), format).dequantize().shape == ()


def test_quantized_rows_cannot_be_transposed() -> None:
    with pytest.raises(ConfigError, match="only dense"):
        QuantizedTensor.quantize(weights(32, 32), QuantFormat.Q8_0).transposed()


def test_bytes_must_fit_the_shape() -> None:
    with pytest.raises(ModelFileError, match="needs bytes of shape"):
        QuantizedTensor(QuantFormat.Q8_0, np.zeros((2, 33), np.uint8), (2, 32))


def test_converted_equals_quantising_the_dequantised_values() -> None:
    tensor = QuantizedTensor.quantize(weights(PANEL_ROWS + 5, 64), QuantFormat.Q8_0)
    expected = QuantizedTensor.quantize(tensor.dequantize(), QuantFormat.Q4_1)
    assert np.array_equal(tensor.converted(QuantFormat.Q4_1).data, expected.data)
    assert tensor.converted(QuantFormat.Q8_0) is tensor
