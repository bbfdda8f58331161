"""Products on every instruction set: the defined arithmetic, bit for bit, for any number of rows and threads."""

from __future__ import annotations

import numpy as np
import pytest
from native_support import block_product, float_product, isas, random_linear, settings, tile_product

from bifolio.errors import ConfigError
from bifolio.kernels import native
from bifolio.kernels.interface import Linear
from bifolio.kernels.reference import ReferenceKernels
from bifolio.quant.formats import ENCODABLE_FORMATS, QuantFormat
from bifolio.quant.tensor import QuantizedTensor

ISAS = isas()
EXACT_ISAS = [isa for isa in ISAS if isa != "amx"]  # AMX multiplies in bfloat16, on tiles
BLOCK_FORMATS = (QuantFormat.Q8_0, QuantFormat.Q4_0, QuantFormat.Q4_1)
FLOAT_FORMATS = (QuantFormat.F32, QuantFormat.F16, QuantFormat.BF16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 32), (3, 17, 96), (7, 33, 2080)])
def test_block_formats_follow_the_defined_arithmetic(isa: str, format: QuantFormat, rows: int, n: int, k: int) -> None:
    rng = np.random.default_rng(rows)
    linear = random_linear(rng, [n], k, format)
    x = rng.standard_normal((rows, k), np.float32) * rng.gamma(1, 2, (rows, 1)).astype(np.float32)
    x[0, :32] = 0  # a block without a scale
    with settings(isa):
        result = native.NativeKernels().linear(x, linear)
    expected = (tile_product if isa == "amx" else block_product)(x, linear.parts[0])
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("isa", EXACT_ISAS)
@pytest.mark.parametrize("format", FLOAT_FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (2, 19, 7), (6, 33, 131)])
def test_float_formats_are_chains_of_fma(isa: str, format: QuantFormat, rows: int, n: int, k: int) -> None:
    rng = np.random.default_rng(k)
    linear = random_linear(rng, [n], k, format)
    x = rng.standard_normal((rows, k), np.float32)
    with settings(isa):
        result = native.NativeKernels().linear(x, linear)
    expected = float_product(x, linear.parts[0].dequantize())
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ENCODABLE_FORMATS)
def test_a_row_does_not_depend_on_the_others(isa: str, format: QuantFormat) -> None:
    """Rows 1 to 70 and every thread count give the same bits, with odd sizes and several fused parts."""
    rng = np.random.default_rng(5)
    kernels = native.NativeKernels()
    linear = kernels.prepare_linear(random_linear(rng, [37, 5, 30], 160, format, bias=True))
    x = rng.standard_normal((70, 160), np.float32)
    with settings(isa, 1):
        alone = np.concatenate([kernels.linear(x[i : i + 1], linear) for i in range(70)])
    for threads in (1, 2, 3, 5):
        with settings(isa, threads):
            for rows in range(1, 71) if threads == 2 else (2, 3, 4, 5, 33, 70):
                np.testing.assert_array_equal(kernels.linear(x[:rows], linear), alone[:rows])


@pytest.mark.parametrize("format", ENCODABLE_FORMATS)
def test_instruction_sets_agree_bit_for_bit(format: QuantFormat) -> None:
    rng = np.random.default_rng(6)
    for rows, n, k in ((1, 64, 576), (5, 48, 4128), (131, 16, 64), (260, 40, 2080)):
        linear = native.NativeKernels().prepare_linear(random_linear(rng, [n], k, format))
        x = rng.standard_normal((rows, k), np.float32)
        results = []
        for isa in EXACT_ISAS:
            with settings(isa):
                results.append(native.NativeKernels().linear(x, linear))
        for other in results[1:]:
            np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ENCODABLE_FORMATS)
def test_close_to_the_reference(isa: str, format: QuantFormat) -> None:
    """The reference keeps activations as they are: the error left is that of making them bytes (or bfloat16)."""
    rng = np.random.default_rng(7)
    linear = random_linear(rng, [64, 32], 256, format, bias=True)
    x = rng.standard_normal((9, 256), np.float32)
    with settings(isa):
        result = native.NativeKernels().linear(x, linear)
    expected = ReferenceKernels().linear(x, linear)
    error = np.abs(result - expected).max() / np.abs(expected).max()
    assert error < (0.005 if isa == "amx" else 0.02 if format in BLOCK_FORMATS else 2e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_weights_are_exact(isa: str) -> None:
    """-128 is a legal byte of Q8_0 although no encoder writes it; sums of 16 bits would overflow."""
    k, n = 64, 16
    data = np.zeros((n, k // 32 * 34), np.uint8)
    blocks = data.reshape(n, 2, 34)
    blocks[:, :, :2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    blocks[:, :, 2:] = np.where(np.arange(n) % 2, 0x80, 0x7F).astype(np.uint8)[:, None, None]
    tensor = QuantizedTensor(QuantFormat.Q8_0, data, (n, k))
    x = np.where(np.arange(3)[:, None] == 0, 127.0, -127.0).astype(np.float32) * np.ones((3, k), np.float32)
    with settings(isa):
        result = native.NativeKernels().linear(x, Linear((tensor,), (None,)))
    np.testing.assert_array_equal(result, x @ tensor.dequantize().T)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ENCODABLE_FORMATS)
def test_nan_shows_in_its_row_alone(isa: str, format: QuantFormat) -> None:
    rng = np.random.default_rng(8)
    linear = random_linear(rng, [16], 64, format)
    x = rng.standard_normal((6, 64), np.float32)
    x[2, 40] = np.nan
    with settings(isa):
        result = native.NativeKernels().linear(x, linear)
    assert np.isnan(result[2]).all()
    assert np.isfinite(np.delete(result, 2, axis=0)).all()


def test_parts_of_different_formats_lie_side_by_side() -> None:
    rng = np.random.default_rng(9)
    parts = tuple(
        QuantizedTensor.quantize(rng.standard_normal((n, 64)), format)
        for n, format in ((20, QuantFormat.Q4_0), (7, QuantFormat.Q8_0), (33, QuantFormat.F16), (3, QuantFormat.F16))
    )
    linear = Linear(parts, (None, np.ones(7, np.float32), None, None))
    x = rng.standard_normal((3, 64), np.float32)
    kernels = native.NativeKernels()
    single = [kernels.linear(x, Linear((part,), (bias,))) for part, bias in zip(parts, linear.biases, strict=True)]
    np.testing.assert_array_equal(kernels.linear(x, linear), np.concatenate(single, axis=1))


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose one of"):
        native.set_isa("mmx")
