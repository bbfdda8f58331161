"""Array API functions of numpy arrays and torch tensors.

Numpy's are its own. Those of torch come from array-api-compat if it is installed, else from `TorchNamespace`, which has
the functions that bifolio uses. With it, an engine on a GPU needs only numpy, torch and triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

Array = Any  # numpy array or torch tensor
NUMPY_IS_COMPLETE = hasattr(np, "cumulative_sum")  # since 2.1


def array_namespace(array: Array) -> Any:
    """The array API namespace of an array; numpy itself needs no wrapper, whose import takes as long as many steps."""
    if NUMPY_IS_COMPLETE and isinstance(array, np.ndarray):
        return np
    compat = _compat()
    if compat is not None:
        return compat.array_namespace(array)
    return np if isinstance(array, np.ndarray) else torch_namespace()


@cache
def _compat() -> Any:
    try:
        import array_api_compat
    except ImportError:
        return None
    return array_api_compat


@cache
def torch_namespace() -> TorchNamespace:
    return TorchNamespace()


class TorchNamespace:
    """Torch functions under the array API's names; all other names are torch's own."""

    def __init__(self) -> None:
        import torch

        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def asarray(self, values: Any, *, dtype: Any = None, device: Any = None, copy: bool | None = None) -> Array:
        tensor = self._torch.as_tensor(values, dtype=dtype, device=device)
        return tensor.clone() if copy and tensor is values else tensor

    def astype(self, values: Array, dtype: Any, *, copy: bool = True) -> Array:
        return values.to(dtype, copy=copy)

    def max(self, values: Array, *, axis: int | None = None, keepdims: bool = False) -> Array:
        return self._torch.max(values) if axis is None else self._torch.amax(values, dim=axis, keepdim=keepdims)

    def sum(self, values: Array, *, axis: int | None = None, keepdims: bool = False) -> Array:
        return self._torch.sum(values) if axis is None else self._torch.sum(values, dim=axis, keepdim=keepdims)

    def mean(self, values: Array, *, axis: int, keepdims: bool = False) -> Array:
        return self._torch.mean(values, dim=axis, keepdim=keepdims)

    def all(self, values: Array) -> Array:
        return self._torch.all(values)

    def argmax(self, values: Array, *, axis: int) -> Array:
        return self._torch.argmax(values, dim=axis)

    def count_nonzero(self, values: Array, *, axis: int) -> Array:
        return self._torch.count_nonzero(values, dim=axis)

    def cumulative_sum(self, values: Array, *, axis: int) -> Array:
        return self._torch.cumsum(values, dim=axis)

    def take_along_axis(self, values: Array, indices: Array, *, axis: int) -> Array:
        return self._torch.take_along_dim(values, indices.long(), dim=axis)

    def sort(self, values: Array, *, axis: int = -1) -> Array:
        return self._torch.sort(values, dim=axis).values

    def nonzero(self, values: Array) -> tuple[Array, ...]:
        return tuple(self._torch.nonzero(values, as_tuple=True))

    def clip(self, values: Array, low: Any, high: Any) -> Array:
        return self._torch.clamp(values, low, high)

    def concat(self, arrays: Any, *, axis: int = 0) -> Array:
        return self._torch.cat(tuple(arrays), dim=axis)

    def stack(self, arrays: Any, *, axis: int = 0) -> Array:
        return self._torch.stack(tuple(arrays), dim=axis)

    def permute_dims(self, values: Array, axes: tuple[int, ...]) -> Array:
        return values.permute(axes)

    def reshape(self, values: Array, shape: tuple[int, ...]) -> Array:
        return values.reshape(shape)
