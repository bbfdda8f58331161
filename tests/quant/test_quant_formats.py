"""The formats that are written, against the gguf package, bit for bit; names and sizes of all formats."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from bifolio.errors import ConfigError, ModelFileError
from bifolio.quant import QuantFormat, QuantizedTensor
from bifolio.quant.formats import ENCODABLE_FORMATS

FORMATS = list(ENCODABLE_FORMATS)
INPUTS = [
    "normal",
    "wide",
    "zeros",
    "negative_zeros",
    "subnormal",
    "tiny",
    "outlier",
    "huge_outlier",
    "halves",
    "constant",
    "one_sided",
]


def make_input(kind: str) -> NDArray[np.float32]:
    generator = np.random.default_rng(INPUTS.index(kind))
    values = generator.standard_normal((70, 96)).astype(np.float32)
    match kind:
        case "wide":
            values *= np.exp2(generator.integers(-60, 12, values.shape)).astype(np.float32)
        case "zeros":
            values[:] = 0
        case "negative_zeros":
            values[:] = -0.0
        case "subnormal":
            values = (values * np.float32(1e-38) * np.float32(1e-3)).astype(np.float32)
        case "tiny":
            values *= np.float32(3e-37)
        case "outlier":
            values[::3, 5] = 3e4
        case "huge_outlier":
            values[::3, 5] = -3e38
        case "halves":
            values = generator.integers(-254, 255, values.shape).astype(np.float32) / 2
            values[:, 0] = 127
        case "constant":
            values[:] = np.float32(0.3)
        case "one_sided":
            values = np.abs(values) + 5
    return values


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_quantize_and_dequantize_equal_the_gguf_package(format: QuantFormat, kind: str) -> None:
    values = make_input(kind)
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType(format.ggml_type))
        restored = gguf.quants.dequantize(expected, gguf.GGMLQuantizationType(format.ggml_type))
        tensor = QuantizedTensor.quantize(values, format)
        result = tensor.dequantize()
    assert tensor.data.tobytes() == expected.tobytes()
    assert result.tobytes() == restored.tobytes()
    assert result.shape == values.shape


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_arbitrary_bytes_dequantize_as_in_the_gguf_package(format: QuantFormat) -> None:
    data = np.random.default_rng(7).integers(0, 256, (40, format.row_bytes(64)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(format.ggml_type))
        result = QuantizedTensor(format, data, (40, 64)).dequantize()
    assert np.array_equal(np.isnan(result), np.isnan(expected))
    finite = ~np.isnan(expected)
    assert result[finite].tobytes() == expected[finite].tobytes()


def test_formats_have_the_sizes_and_numbers_of_ggml() -> None:
    known = {kind.name: kind for kind in gguf.GGMLQuantizationType}
    for format in QuantFormat:
        assert QuantFormat.from_ggml_type(format.ggml_type) is format
        if format.name in known:  # an older gguf package lacks the newest
            assert format.ggml_type == int(known[format.name])
            assert gguf.GGML_QUANT_SIZES[known[format.name]] == (format.block_elements, format.block_bytes)
    assert sum(format.name in known for format in QuantFormat) >= 31
    assert QuantFormat.from_ggml_type(4) is None  # a number that GGML has given up


def test_few_formats_are_written_and_nearly_all_read() -> None:
    assert {format for format in QuantFormat if format.is_encodable} == set(FORMATS)
    assert set(FORMATS) < {format for format in QuantFormat if format.is_readable}
    with pytest.raises(ConfigError, match="Q4_K can be read but not written: use one of f32"):
        QuantizedTensor.quantize(np.zeros((1, 256), np.float32), QuantFormat.Q4_K)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_nan_and_infinities_are_refused_by_name_and_place(format: QuantFormat, bad: float) -> None:
    values = np.zeros((3, 32), np.float32)
    values[2, 7] = bad
    with pytest.raises(ModelFileError, match=r"blk\.0.*(NaN|infinity) at \[2, 7\]"):
        QuantizedTensor.quantize(values, format, name="blk.0")


def test_parse_knows_every_format_and_lists_them_otherwise() -> None:
    assert [QuantFormat.parse(format.name.lower()) for format in FORMATS] == FORMATS
    with pytest.raises(ConfigError, match="read but not written: use one of f32, f16, bf16, q8_0, q4_0, q4_1"):
        QuantFormat.parse("q5_0")
    with pytest.raises(ConfigError, match="unknown format 'q5_9': use one of f32"):
        QuantFormat.parse("q5_9")


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 32"):
        QuantizedTensor.quantize(np.zeros((2, 33), np.float32), QuantFormat.Q4_0)
