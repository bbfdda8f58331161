"""Functions on numpy arrays that the reference operations need: the error function, and sparse mixing of experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from bifolio.kernels.interface import Array, Router, Routing


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


def mix_sparsely(logits: np.ndarray, router: Router) -> Routing:
    """Each choice has the share of its logit in a softmax over the logits that are left and close to it."""
    left, rows = logits.copy(), np.arange(len(logits))
    experts, weights = [], []
    for _ in range(router.top_k):
        best = left.argmax(axis=-1)
        highest = left[rows, best][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            is_far = (highest - logits) / np.maximum(np.abs(logits), highest) > np.float32(router.band)
        shares = np.where(is_far, np.float32(0), np.exp(left - highest))
        experts.append(best)
        weights.append(router.scale / shares.sum(axis=-1))
        left[rows, best] = -np.inf
    return Routing(np.stack(experts, axis=-1).astype(np.int32), np.stack(weights, axis=-1).astype(np.float32))


def as_float32(xp: Any, x: Array) -> Array:
    """Floats of at least 32 bits."""
    return x if x.dtype in (xp.float32, xp.float64) else xp.astype(x, xp.float32)
