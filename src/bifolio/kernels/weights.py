"""Weights of logits: exponentials as integers, the same bits in numpy, torch, C++ and Triton.

A weight is `floor(exp((logit - highest) * warmth) * 2**40)`, where warmth is 1 / temperature and exp the polynomial
below: single-precision operations that IEEE 754 defines to the last bit, in this order, none of them fused. Its error
is below 1.5 units in the last place. `native/kernels/elementwise.h` and `kernels/triton/weights.py` hold the same
lines.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from bifolio.arrays import array_namespace
from bifolio.errors import MissingDependencyError

Array = Any  # a numpy array or a torch tensor; shapes are given in comments
ONE = 1 << 40  # the weight of the largest logit
LOWEST = -60.0  # its weight is 0
LOG2_E, LN2_HIGH, LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_PIECE = 1 << 14  # numbers whose intermediate results stay in a near cache


def warmth_of(temperature: np.ndarray) -> np.ndarray:
    """f32[r]: 1 / temperature, the factor of the logits; finite for every normal temperature."""
    return (np.float32(1.0) / temperature.astype(np.float32)).astype(np.float32)


def weights_of(logits: Array, highest: Array, warmth: Array | None = None) -> Array:
    """i64[r, n] weights of f32[r, n] logits without NaN.

    highest: f32[r, 1] the largest of each row; warmth: f32[r, 1], both beside the logits; None: 1.
    """
    if not isinstance(logits, np.ndarray):
        shifted = logits - highest
        return _weights(array_namespace(logits), shifted if warmth is None else shifted * warmth)
    module = _native()
    weights = np.empty(logits.shape, np.int64)
    factor = np.ones(len(logits), np.float32) if warmth is None else _vector(warmth)
    if module is not None and logits.size:
        module.weights(np.ascontiguousarray(logits, np.float32), _vector(highest), factor, weights)
        return weights
    with np.errstate(over="ignore"):
        for row in range(len(logits)):
            for start in range(0, logits.shape[1], _PIECE):
                shifted = logits[row, start : start + _PIECE] - highest[row]
                weights[row, start : start + _PIECE] = _weights(np, shifted * factor[row])
    return weights


def _weights(xp: Any, cooled: Array) -> Array:
    """i64[...] of f32[...] numbers up to 0."""

    def number(value: float) -> Array:
        return xp.asarray(value, dtype=xp.float32, **({} if xp is np else {"device": cooled.device}))

    value = xp.clip(cooled, number(LOWEST), number(0.0))
    n = xp.floor(value * number(LOG2_E) + number(0.5))
    r = (value - n * number(LN2_HIGH)) - n * number(LN2_LOW)
    p = number(POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        p = p * r + number(coefficient)
    p = p * (r * r) + r + number(1.0)
    bits = (p * number(1 << 24)).astype(np.int64) if xp is np else (p * number(1 << 24)).long()
    places = (-n).astype(np.int64) if xp is np else (-n).long()
    return (bits << 16) >> places.clip(None, 63)


@cache
def _native() -> Any:
    from bifolio.kernels.native.library import library

    try:
        return library()
    except MissingDependencyError:
        return None


def _vector(column: Any) -> np.ndarray:
    return np.ascontiguousarray(np.reshape(column, -1), dtype=np.float32)
