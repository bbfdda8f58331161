"""Functions that supply the tensors of a network by name and shape."""

from __future__ import annotations

from collections.abc import Callable

from bifolio.kernels.interface import Array
from bifolio.quant.tensor import QuantizedTensor

Tensor = QuantizedTensor | Array
Fetch = Callable[[str, tuple[int, ...]], Tensor]  # (full name, expected shape [out, in]) -> tensor, or a named error
FetchVector = Callable[[str, tuple[int, ...]], Array]  # the same as f32 array, for norms and biases
