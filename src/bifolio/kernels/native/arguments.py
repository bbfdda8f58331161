"""Values as the extension module takes them: arrays, norms, codes of activations, registers of a recorded program."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bifolio.kernels.interface import Array, Norm

ACTIVATION_CODES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu2": 3, "swiglu_clamped": 4, "tanh": 5}


class Register(NamedTuple):
    """The result of an operation: float rows, whose number is set when the program runs."""

    number: int


def floats(array: Array) -> np.ndarray:
    return np.ascontiguousarray(array, np.float32)


def native_norm(native: Any, norm: Norm) -> Any:
    """The norm as an object of the extension module `native`."""
    bias = None if norm.bias is None else floats(norm.bias)
    return native.Norm(floats(norm.weight), bias, norm.eps, norm.centered)
