"""bfloat16 in numpy, against torch's."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.quant.formats import bf16_to_f32, f32_to_bf16


def test_every_bfloat16_survives_a_round_trip() -> None:
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    values = bf16_to_f32(bits)
    again = f32_to_bf16(values)
    nans = np.isnan(values)
    np.testing.assert_array_equal(again[~nans], bits[~nans])
    assert np.isnan(bf16_to_f32(again[nans])).all()


def test_rounding_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)  # exactly between two
    edges = np.array([0, 0x80000000, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x00007FFF, 0x00018000], dtype=np.uint32)
    values = np.concatenate([bits, ties, edges]).view(np.float32)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(f32_to_bf16(values), expected)


def test_nan_stays_nan_and_shapes_stay() -> None:
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001], dtype=np.uint32).view(np.float32)
    assert np.isnan(bf16_to_f32(f32_to_bf16(nans))).all()
    assert f32_to_bf16(np.zeros((2, 0, 3), dtype=np.float32)).shape == (2, 0, 3)
    assert f32_to_bf16(1.0).shape == ()
    assert bf16_to_f32(f32_to_bf16(np.ones((4, 6), dtype=np.float32)[:, ::2])).tolist() == [[1.0] * 3] * 4
