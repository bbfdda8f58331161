"""Functions that supply the tensors of a network by name and shape."""

from __future__ import annotations

from collections.abc import Callable

from bifolio.kernels.interface import Array
from bifolio.quant.tensor import QuantizedTensor

Tensor = QuantizedTensor | Array
Fetch = Callable[[str, tuple[int, ...]], Tensor]  # (full name, expected shape [out, in]) -> tensor, or a named error
FetchVector = Callable[[str, tuple[int, ...]], Array]  # the same as f32 array, for norms and biases


def stacked_matrices(name: str, count: int, shape: tuple[int, int], fetch: Fetch) -> list[Tensor]:
    """As many matrices, by names with {}, or views of one tensor [count, out, in]."""
    if "{}" in name:
        return [fetch(name.format(number) + ".weight", shape) for number in range(count)]
    stack = fetch(name + ".weight", (count, *shape))
    if not isinstance(stack, QuantizedTensor):
        return list(stack)
    return [stack.select_rows(slice(number * shape[0], (number + 1) * shape[0])) for number in range(count)]


def fetched_once(fetch: Fetch) -> Fetch:
    """`fetch` that gives the same matrix for the same name."""
    known: dict[str, Tensor] = {}

    def found(name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in known:
            known[name] = fetch(name, shape)
        return known[name]

    return found
