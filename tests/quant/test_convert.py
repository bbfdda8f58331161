"""Formats that a kernel set does not take: which one they become, and that not a bit of the result has changed."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import gguf
import numpy as np
import pytest

from bifolio.errors import ConfigError, ModelFileError, UnsupportedModelError
from bifolio.quant import QuantFormat, QuantizedTensor
from bifolio.quant.convert import DENSE_FORMATS, conversion_notes, convert, converted_bytes, target_format
from bifolio.quant.formats import ENCODABLE_FORMATS, READABLE_FORMATS
from exotic_weights import exotic_tensor

WRITABLE = frozenset(ENCODABLE_FORMATS)
# The format that random blocks become, and the start of the digest of the bytes.
CONVERTED = {
    "F64": ("F32", "4248e84237b4baf9"),
    "I8": ("F32", "d61152cbfb862d14"),
    "I16": ("F32", "7d45b5251131c841"),
    "I32": ("F32", "19c71cd704e43b9c"),
    "I64": ("F32", "66b6d9fd25ce02cf"),
    "Q5_0": ("Q8_0", "f111b15d06b2bead"),
    "Q5_1": ("Q8_0", "6766bdb708a4fa1c"),
    "Q2_K": ("Q8_0", "590a9a80d5e94f9f"),
    "Q3_K": ("Q8_0", "7f39fb2a2314b90e"),
    "Q4_K": ("Q4_1", "99d2589b79e6a6e1"),
    "Q5_K": ("Q8_0", "1952e6953b7406ea"),
    "Q6_K": ("Q8_0", "0ed38976c85531c0"),
    "IQ1_S": ("Q8_0", "2621313148bee4c7"),
    "IQ2_XXS": ("Q8_0", "2eb56be7b0d78d68"),
    "IQ2_XS": ("Q8_0", "7101b064866c401d"),
    "IQ2_S": ("Q8_0", "e75aa73612787a17"),
    "IQ3_XXS": ("Q8_0", "9d9a1b8c7ddd3f8d"),
    "IQ3_S": ("Q8_0", "3a1c63ea9b999515"),
    "IQ4_NL": ("Q8_0", "084fc3d020f911b3"),
    "IQ4_XS": ("Q8_0", "9bb8771c3bcf3871"),
    "TQ1_0": ("Q8_0", "6c43748304e297fa"),
    "TQ2_0": ("Q8_0", "3f07491ad49a0471"),
    "MXFP4": ("Q8_0", "b0d091833a9e04de"),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_the_bytes_that_a_format_becomes(name: str) -> None:
    tensor = exotic_tensor(name, 300, 512)
    result = convert(tensor, WRITABLE)
    assert (result.format.name, hashlib.sha256(result.data.tobytes()).hexdigest()[:16]) == CONVERTED[name]
    assert result.shape == tensor.shape
    assert converted_bytes(tensor, WRITABLE) == result.nbytes


@pytest.mark.parametrize("name", CONVERTED)
def test_the_values_stay_those_that_the_gguf_package_reads(name: str) -> None:
    tensor = exotic_tensor(name, 300, 512)
    expected = tensor.dequantize()
    if tensor.format.is_quantized:
        assert np.array_equal(expected, gguf.quants.dequantize(tensor.data, gguf.GGMLQuantizationType[name]))
    result = convert(tensor, WRITABLE).dequantize()
    error = np.abs(result - expected).reshape(-1, 32)
    largest = np.abs(expected).reshape(-1, 32).max(axis=1, keepdims=True)
    # Q4_K keeps its codes, so only the rounding of scale and minimum to halves is lost; Q8_0 adds half a step.
    if name == "Q4_K":
        assert error.max() <= (np.abs(result).max() + np.abs(expected).max()) * 2**-10
    else:
        assert (error <= largest * (0.005 if tensor.format.is_quantized else 0)).all()


def test_q4_k_keeps_its_codes() -> None:
    """Scales and minimums by the gguf package's own reading of the six bits."""
    tensor = exotic_tensor("Q4_K", 3, 512)
    blocks = tensor.data.reshape(-1, 144)
    scales, minimums = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    d, dmin = (blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    result = convert(tensor, WRITABLE).data.reshape(-1, 8, 20)
    halves = result[:, :, :4].copy().view(np.float16)
    assert np.array_equal(halves[:, :, 0], (d * scales).astype(np.float16))
    assert np.array_equal(halves[:, :, 1], (dmin * -minimums.astype(np.float32)).astype(np.float16))
    codes = np.concatenate([result[:, :, 4:] & 15, result[:, :, 4:] >> 4], axis=2)  # [blocks, 8, 32]
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    assert np.array_equal(codes[:, 0::2], packed & 15)
    assert np.array_equal(codes[:, 1::2], packed >> 4)


def test_accepted_tensors_and_plain_arrays_pass_through() -> None:
    tensor = exotic_tensor("Q4_K", 2, 256)
    assert convert(tensor, READABLE_FORMATS) is tensor
    array = np.ones((2, 2), np.float32)
    assert convert(array, WRITABLE) is array
    assert converted_bytes(array, WRITABLE) == 16


def test_the_target_is_the_nearest_that_is_accepted() -> None:
    assert target_format(QuantFormat.Q4_K, WRITABLE) is QuantFormat.Q4_1
    assert target_format(QuantFormat.Q4_K, DENSE_FORMATS | {QuantFormat.Q8_0}) is QuantFormat.Q8_0
    assert target_format(QuantFormat.Q4_K, DENSE_FORMATS) is QuantFormat.F32
    with pytest.raises(ConfigError, match="F64 weights cannot be converted to one of Q8_0"):
        target_format(QuantFormat.F64, {QuantFormat.Q8_0})


def test_notes_count_conversions_by_format() -> None:
    formats = [QuantFormat.Q4_K, QuantFormat.F32, QuantFormat.Q4_K, QuantFormat.Q6_K]
    assert conversion_notes(formats, WRITABLE, "native") == [
        "the native kernels convert 2 matrices of type Q4_K to Q4_1 at load",
        "the native kernels convert 1 matrix of type Q6_K to Q8_0 at load",
    ]
    assert conversion_notes(formats, READABLE_FORMATS, "reference") == []


def test_values_that_no_format_holds_are_refused_by_name() -> None:
    tensor = exotic_tensor("Q6_K", 2, 256)
    tensor.data[1, 208:210] = np.array([np.inf], np.float16).view(np.uint8)
    named = QuantizedTensor(tensor.format, tensor.data, tensor.shape, "blk.0.ffn_down.weight")
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_down\.weight holds (NaN|an infinity) at \[1, "):
        convert(named, WRITABLE)


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "Q1_0"])
def test_a_type_that_cannot_be_decoded_is_refused_by_name(name: str) -> None:
    assert not QuantFormat[name].is_readable
    tensor = exotic_tensor(name, 1, QuantFormat[name].block_elements)
    with pytest.raises(UnsupportedModelError, match=name):
        tensor.dequantize()


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "IQ2_XXS"])
def test_rows_and_products_of_any_format(name: str) -> None:
    tensor = exotic_tensor(name, 700, 256)
    whole = tensor.dequantize()
    rows = np.array([699, 0, 12])
    assert np.array_equal(tensor.dequantize_rows(rows), whole[rows])
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    np.testing.assert_allclose(tensor.matmul(x), x @ whole.T, rtol=1e-4, atol=1e-3)
    assert np.array_equal(tensor.select_rows(rows).dequantize(), whole[rows])


@pytest.mark.full
def test_names_and_sizes_need_no_gguf_package() -> None:
    code = (
        "import sys; from bifolio.quant import QuantFormat; from bifolio.quant.formats import decode_blocks\n"
        "import numpy as np; decode_blocks(np.zeros((1, 34), np.uint8), QuantFormat.Q8_0)\n"
        "print([f.bytes_for((2, 256)) for f in QuantFormat][-1], 'gguf' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "72 False\n"
