"""Every format of files in the native kernels: decoded, multiplied, encoded. The gguf package is the oracle."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from bifolio.errors import KernelArgumentError, ModelFileError
from bifolio.kernels.interface import Linear
from bifolio.kernels.native import NativeKernels, available_isas, library, set_isa
from bifolio.kernels.native.encode import (
    PLAIN_FORMATS,
    SEARCHED_FORMATS,
    decode_rows,
    encode_rows,
    encoded,
    quickly_converted,
)
from bifolio.kernels.native.formats import FORMAT_CODES, NATIVE_FORMATS, format_code, packed_bytes
from bifolio.quant import QuantFormat, QuantizedTensor
from exotic_weights import exotic_tensor

pytestmark = pytest.mark.full

KNOWN = gguf.GGMLQuantizationType.__members__  # older versions of the package lack the newest formats
BLOCKS = sorted((f for f in NATIVE_FORMATS if f.is_quantized and f.name in KNOWN), key=lambda format: format.name)
COMPACT = ("Q2_K", "Q3_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M")  # as in a file
EVERY = pytest.mark.parametrize("format", BLOCKS, ids=lambda format: format.name)


def oracle(tensor: QuantizedTensor) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.format.name])


def random_bytes(format: QuantFormat, rows: int, columns: int) -> QuantizedTensor:
    """Any bytes, scales included, as long as all values are finite."""
    generator = np.random.default_rng(format.ggml_type)
    data = generator.integers(0, 256, (rows, format.row_bytes(columns)), dtype=np.uint8)
    tensor = QuantizedTensor(format, data, (rows, columns))
    good = np.isfinite(oracle(tensor)).all(axis=1)
    return QuantizedTensor(format, np.ascontiguousarray(data[good]), (int(good.sum()), columns))


def test_the_codes_of_formats_are_those_of_the_library() -> None:
    assert list(FORMAT_CODES) == library().file_formats()


@EVERY
def test_blocks_decode_bit_for_bit(format: QuantFormat) -> None:
    for tensor in (exotic_tensor(format.name, 3, 512), random_bytes(format, 400, format.block_elements)):
        assert tensor.num_rows >= 3
        found = decode_rows(tensor, slice(None))
        assert np.array_equal(found.view(np.uint32), oracle(tensor).view(np.uint32))


@EVERY
def test_rows_of_a_table_are_those_of_the_gguf_package(format: QuantFormat) -> None:
    kernels = NativeKernels(1)
    tensor = exotic_tensor(format.name, 20, 256)
    table = kernels.prepare_embedding(tensor)
    ids = np.array([19, 0, 7, 7], np.int32)
    assert np.array_equal(kernels.embed(table, ids, 1.0), oracle(tensor)[ids])


@EVERY
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 16, 256), (3, 37, 512), (6, 5, 768), (21, 50, 2304)])
def test_products_are_near_those_of_the_decoded_weights(format: QuantFormat, rows: int, n: int, k: int) -> None:
    tensor = exotic_tensor(format.name, n, k)
    x = np.random.default_rng(rows).standard_normal((rows, k)).astype(np.float32)
    expected = x.astype(np.float64) @ oracle(tensor).astype(np.float64).T
    for name in available_isas():
        set_isa(name)
        try:
            exact, usual = NativeKernels(1, activations="int16"), NativeKernels(1)
            for kernels, tolerance in ((exact, 5e-4), (usual, 2e-2)):
                linear = kernels.prepare_linear(Linear((tensor,), (None,)))
                error = np.linalg.norm(kernels.linear(x, linear) - expected) / np.linalg.norm(expected)
                assert error < tolerance, (name, format.name, error)
        finally:
            set_isa("")


@EVERY
def test_a_row_does_not_depend_on_the_others(format: QuantFormat) -> None:
    kernels = NativeKernels(1)
    tensor = exotic_tensor(format.name, 35, 1536)
    linear = kernels.prepare_linear(Linear((tensor,), (None,)))
    x = np.random.default_rng(5).standard_normal((37, 1536)).astype(np.float32)
    together = kernels.linear(x, linear)
    for name in available_isas():
        set_isa(name)
        try:
            together = kernels.linear(x, linear)
            for count in (1, 2, 3, 4, 5, 16):
                assert np.array_equal(kernels.linear(x[:count], linear), together[:count])
                assert np.array_equal(kernels.linear(x[37 - count :], linear), together[37 - count :])
        finally:
            set_isa("")


@pytest.mark.parametrize("name", COMPACT)
def test_weights_of_few_bits_are_those_of_the_file(name: str) -> None:
    """A product with a single number, which bytes hold exactly, is one value of the file, rounded once."""
    tensor = random_bytes(QuantFormat[name], 60, 512)
    values = oracle(tensor)
    columns = np.random.default_rng(3).permutation(512)
    for isa in available_isas():
        set_isa(isa)
        try:
            kernels = NativeKernels(1, activations="int16")  # not on tiles
            linear = kernels.prepare_linear(Linear((tensor,), (None,)))
            for count in (1, 3, 21):
                chosen = columns[:count]
                x = np.zeros((count, 512), np.float32)
                x[np.arange(count), chosen] = 127.0
                expected = np.float32(127.0) * values[:, chosen].T
                found = kernels.linear(x, linear)
                if name == "Q2_K":  # a product with the minimum is added: two roundings
                    largest = np.abs(expected).max(axis=0)
                    assert (np.abs(found - expected) <= 1e-6 * largest).all(), isa
                else:
                    assert np.array_equal(found, expected), isa
        finally:
            set_isa("")


@pytest.mark.parametrize("activations", ["int8", "int16"])
@pytest.mark.parametrize("name", COMPACT)
def test_instruction_sets_agree_bit_for_bit_on_few_bits(name: str, activations: str) -> None:
    """All rows, and some alone: one row of bytes has kernels of its own."""
    tensor = exotic_tensor(name, 50, 2304)
    x = np.random.default_rng(8).standard_normal((21, 2304)).astype(np.float32)
    found = {}
    for isa in available_isas():
        set_isa(isa)
        try:
            kernels = NativeKernels(1, activations=activations)
            linear = kernels.prepare_linear(Linear((tensor,), (None,)))
            found[isa] = kernels.linear(x, linear)
            for count in (1, 2, 5):
                assert np.array_equal(kernels.linear(x[:count], linear), found[isa][:count]), isa
        finally:
            set_isa("")
    exact = {isa: y for isa, y in found.items() if (isa, activations) != ("amx", "int8")}
    assert all(np.array_equal(y, exact["generic"]) for y in exact.values())


def test_parts_of_several_formats_lie_side_by_side() -> None:
    kernels = NativeKernels(1)
    names = ("Q4_K", "Q4_1", "Q6_K", "IQ4_XS", "MXFP4", "Q5_K", "IQ2_S", "IQ2_XS", "Q2_K", "Q3_K")
    parts = tuple(exotic_tensor(name, 24, 256) for name in names)
    x = np.random.default_rng(1).standard_normal((2, 256)).astype(np.float32)
    bias = np.arange(24, dtype=np.float32)
    joined = kernels.linear(x, kernels.prepare_linear(Linear(parts, (bias,) * len(parts))))
    alone = [kernels.linear(x, kernels.prepare_linear(Linear((part,), (bias,)))) for part in parts]
    assert np.array_equal(joined, np.concatenate(alone, axis=1))


def test_packed_weights_take_about_the_size_of_the_file() -> None:
    shape = (1024, 2048)
    wide = {"Q4_K": 1.12, "Q6_K": 1.07, "IQ4_NL": 1.01, "MXFP4": 1.07, "IQ4_XS": 1.06, "Q8_0": 1.0}
    for name, most in (dict.fromkeys(COMPACT, 1.05) | wide).items():
        format = QuantFormat[name]
        assert packed_bytes(library(), format, shape) <= most * format.bytes_for(shape)
        kernels = NativeKernels(1)
        linear = kernels.prepare_linear(Linear((exotic_tensor(name, *shape),), (None,)))
        assert linear.prepared.num_bytes == packed_bytes(library(), format, shape)


@EVERY
def test_the_bits_of_a_packed_value_are_those_of_the_library(format: QuantFormat) -> None:
    assert packed_bytes(library(), format, (16, 512)) * 8 == NATIVE_FORMATS.held_bits[format] * 16 * 512


def test_scales_beyond_half_floats_are_multiplied_as_floats() -> None:
    kernels = NativeKernels(1)
    tensor = exotic_tensor("MXFP4", 4, 64)
    tensor.data.reshape(-1, 17)[:, 0] = 170  # 2^42
    x = np.random.default_rng(2).standard_normal((1, 64)).astype(np.float32)
    found = kernels.linear(x, kernels.prepare_linear(Linear((tensor,), (None,))))
    np.testing.assert_allclose(found, x @ oracle(tensor).T, rtol=1e-3)


@pytest.mark.parametrize(
    ("format", "place"),
    [("Q6_K", 208), ("Q4_K", 0), ("Q4_K", 2), ("Q2_K", 80), ("Q2_K", 82), ("Q3_K", 108), ("IQ2_XXS", 0), ("IQ3_S", 0)],
)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_damaged_scales_are_refused_by_name(format: str, place: int, value: float) -> None:
    tensor = exotic_tensor(format, 2, 256)
    tensor.data[1, place : place + 2] = np.array([value], np.float16).view(np.uint8)
    named = QuantizedTensor(tensor.format, tensor.data, tensor.shape, "blk.0.ffn_down.weight")
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_down\.weight holds (NaN|an infinity)"):
        NativeKernels(1).prepare_linear(Linear((named,), (None,)))


def test_a_grid_of_the_wrong_size_is_refused() -> None:
    native = library()
    code = format_code(native, QuantFormat.IQ2_XXS)
    for rows in (np.zeros((255, 8), np.uint8), np.zeros((256, 4), np.uint8), np.full((256, 8), 9, np.uint8)):
        with pytest.raises(KernelArgumentError):
            native.set_grid(code, rows)
    with pytest.raises(KernelArgumentError, match="no grid"):
        native.set_grid(FORMAT_CODES["Q4_K"], np.zeros((256, 8), np.uint8))


# -- encoding --------------------------------------------------------------------------------------------------------

# Relative error (root mean square) of normally distributed values, which a search must stay below.
MOST_ERROR = {
    "Q4_K": 0.075,
    "Q5_K": 0.038,
    "Q6_K": 0.019,
    "IQ4_NL": 0.085,
    "IQ4_XS": 0.087,
    "Q5_0": 0.046,
    "Q5_1": 0.041,
}


def relative_error(values: np.ndarray, tensor: QuantizedTensor, weights: np.ndarray | float = 1.0) -> float:
    return float(np.sqrt((weights * (oracle(tensor) - values) ** 2).sum() / (weights * values**2).sum()))


@pytest.mark.parametrize("name", MOST_ERROR)
def test_encoded_values_are_near(name: str) -> None:
    values = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32) * 0.02
    tensor = QuantizedTensor(QuantFormat[name], encode_rows(values, QuantFormat[name]), values.shape)
    assert relative_error(values, tensor) < MOST_ERROR[name]


def test_every_searched_format_is_tested() -> None:
    assert {format.name for format in SEARCHED_FORMATS} == set(MOST_ERROR)


@pytest.mark.parametrize("name", ["Q5_0", "Q5_1", "Q8_0", "Q4_0", "Q4_1"])
def test_plain_rounding_is_that_of_the_gguf_package(name: str) -> None:
    values = np.random.default_rng(3).standard_normal((30, 256)).astype(np.float32)
    assert np.array_equal(
        encode_rows(values, QuantFormat[name]), gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    )


@pytest.mark.parametrize("format", sorted(PLAIN_FORMATS, key=str))
def test_quick_conversion_is_that_of_numpy(format: QuantFormat) -> None:
    generator = np.random.default_rng(4)
    values = generator.standard_normal((70, 512)) * 10.0 ** generator.integers(-8, 3, (70, 1))
    values[0, :64] = 0
    values[1] = np.round(values[1] * 4) / 4  # ties
    values = values.astype(np.float32)
    for source in (QuantFormat.F16, QuantFormat.Q6_K, QuantFormat.Q8_0):
        rows = values.astype(np.float16).view(np.uint8) if source is QuantFormat.F16 else encode_rows(values, source)
        tensor = QuantizedTensor(source, rows, values.shape)
        quick = quickly_converted(tensor, format)
        assert quick.format is format
        assert np.array_equal(quick.dequantize(), tensor.converted(format).dequantize())


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_zeros_and_single_values_survive(name: str) -> None:
    values = np.zeros((3, 256), np.float32)
    values[1, 40] = -0.75
    values[2] = 0.5
    tensor = QuantizedTensor(QuantFormat[name], encode_rows(values, QuantFormat[name]), values.shape)
    found = oracle(tensor)
    assert not found[0].any()
    np.testing.assert_allclose(found[1:], values[1:], atol=0.02)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_importance_moves_precision_to_the_columns_that_matter(name: str) -> None:
    generator = np.random.default_rng(7)
    values = generator.standard_normal((64, 512)).astype(np.float32)
    importance = np.exp(generator.standard_normal(512) * 2).astype(np.float32)
    format = QuantFormat[name]
    plain, weighed = (QuantizedTensor(format, encode_rows(values, format, w), values.shape) for w in (None, importance))
    assert relative_error(values, weighed, importance) < relative_error(values, plain, importance)


def test_values_that_no_format_holds_are_refused_by_name() -> None:
    values = np.ones((2, 256), np.float32)
    values[1, 3] = np.nan
    with pytest.raises(ModelFileError, match=r"w holds NaN at \[1, 3\]"):
        encoded(QuantizedTensor.from_array(values), QuantFormat.Q4_K, "w")
    values[1, 3] = 1e30
    with pytest.raises(ModelFileError, match="w holds values too large for Q6_K"):
        encoded(QuantizedTensor.from_array(values), QuantFormat.Q6_K, "w")
