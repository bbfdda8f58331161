"""Functions on arrays that the reference operations need."""

from __future__ import annotations

from typing import Any

import numpy as np

from bifolio.kernels.operands import Array


def erf(xp: Any, x: Array) -> Array:
    """The error function; numpy has none, so a Chebyshev fit of its complement (error < 1.2e-7)."""
    if not isinstance(x, np.ndarray):
        import torch

        return torch.erf(x)
    t = 1.0 / (1.0 + 0.5 * np.abs(x.astype(np.float64)))
    coefficients = (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806,
                    0.27886807, -1.13520398, 1.48851587, -0.82215223, 0.17087277)  # fmt: skip
    polynomial = np.polyval(coefficients[::-1], t)
    tail = t * np.exp(-(x.astype(np.float64) ** 2) + polynomial)
    return np.where(x >= 0, 1.0 - tail, tail - 1.0).astype(x.dtype)


def as_float32(xp: Any, x: Array) -> Array:
    """Floats of at least 32 bits."""
    return x if x.dtype in (xp.float32, xp.float64) else xp.astype(x, xp.float32)
