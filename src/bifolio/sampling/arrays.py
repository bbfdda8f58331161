"""numpy arrays and torch tensors under one interface (the array API)."""

from __future__ import annotations

from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from bifolio.arrays import array_namespace

Array = Any
"""A numpy array or a torch tensor; shapes are given in comments."""

_NUMPY: Any = np if hasattr(np, "cumulative_sum") else None  # numpy itself follows the standard since 2.1


def is_numpy(values: Array) -> TypeGuard[NDArray[Any]]:
    return isinstance(values, np.ndarray)


def namespace(values: Array) -> Any:
    """The module whose functions take this array: numpy without a wrapper's cost, or torch under the same names."""
    if _NUMPY is not None and is_numpy(values):
        return _NUMPY
    return array_namespace(values)


def device(values: Array) -> Any:
    """Where the array lies, for the `device=` of functions that make arrays."""
    return "cpu" if is_numpy(values) else values.device


def to_host(values: Array) -> NDArray[Any]:
    """The same numbers as a numpy array; waits for the device."""
    return np.asarray(values.cpu()) if hasattr(values, "cpu") else np.asarray(values)
