"""Weights: one definition, the same integers in numpy, torch and on every instruction set."""

from __future__ import annotations

from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pytest

from bifolio.kernels import weights
from bifolio.kernels.native.library import available_isas, set_isa
from bifolio.kernels.weights import ONE, weights_of

torch = pytest.importorskip("torch")


def cases() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 6, (5, 4321)).astype(np.float32)
    logits[0, :3] = -np.inf, -0.0, 0.0
    logits[1] = np.float32(-3.4e38)
    logits[1, 7] = np.float32(3.4e38)
    logits[2] = np.linspace(-1e-6, 0, 4321, dtype=np.float32)
    warmth = np.array([[1.25], [1.0], [1.0], [1e30], [0.03]], np.float32)
    return logits, logits.max(axis=1, keepdims=True), warmth


def in_numpy(*arguments: np.ndarray) -> np.ndarray:
    with patch.object(weights, "_native", lambda: None):
        return np.asarray(weights_of(*arguments))


def test_torch_gives_the_integers_of_numpy() -> None:
    logits, highest, warmth = cases()
    found = weights_of(*(torch.from_numpy(array) for array in (logits, highest, warmth))).numpy()
    assert np.array_equal(found, in_numpy(logits, highest, warmth))


def test_every_instruction_set_gives_the_integers_of_numpy() -> None:
    expected = in_numpy(*cases())
    try:
        for isa in available_isas():
            set_isa(isa)
            assert np.array_equal(weights_of(*cases()), expected), isa
    finally:
        set_isa("")


def test_weights_are_exponentials() -> None:
    x = -np.linspace(0, 27, 100_001, dtype=np.float32)[None, :]
    found = np.asarray(weights_of(x, np.zeros((1, 1), np.float32)))[0]
    exact = np.exp(x[0].astype(np.float64)) * ONE
    assert found[0] == ONE
    assert np.all(np.diff(found) <= 0), "a smaller logit never has a larger weight"
    assert np.all(np.abs(found - exact) <= exact * float(Fraction(3, 2**25)) + 1)
    assert in_numpy(np.array([[0.0, -28.0, -61.0, -np.inf]], np.float32), np.zeros((1, 1), np.float32)).tolist() == [
        [ONE, 0, 0, 0]
    ]
