"""Kernels that are recorded instead of run: the variants that a GPU would compile, by Triton's rules.

A variant of a kernel is one set of compile-time constants, types of arguments, and properties of arguments that the
compiler specialises on: integers that are 1 or multiples of 16, pointers that are multiples of 16 bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

Variant = tuple[Any, ...]


def variant_of(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Variant:
    names = [name for name in kernel.arg_names if name not in options]
    given = {**dict(zip(names, args, strict=False)), **{k: v for k, v in options.items() if k in kernel.arg_names}}
    annotations = {name: str(p.annotation) for name, p in inspect.signature(kernel.fn).parameters.items()}
    plain = kernel.kwargs.get("do_not_specialize") or ()
    unaligned = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    parts = [
        (name, _property(given[name], "constexpr" in annotations[name], name in plain, name in unaligned))
        for name in kernel.arg_names
    ]
    launch = sorted((name, value) for name, value in options.items() if name not in kernel.arg_names)
    return kernel.fn.__module__.rsplit(".", 1)[-1], kernel.fn.__name__, tuple(parts), tuple(launch)


def _property(value: Any, is_constant: bool, plain: bool, unaligned: bool) -> Any:
    if is_constant:
        return value
    if isinstance(value, torch.Tensor):
        return str(value.dtype), not unaligned and value.data_ptr() % 16 == 0
    if isinstance(value, int) and not isinstance(value, bool):
        if plain:
            return "int"
        return 1 if value == 1 else ("int", not unaligned and value % 16 == 0)
    return type(value).__name__


@contextmanager
def recorded_launches() -> Iterator[set[Variant]]:
    """The variants of all kernels that are launched inside; none of them runs, so results mean nothing."""
    found: set[Variant] = set()

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.add(variant_of(self, args, options))

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x.new_zeros((*x.shape[:-1], weight.shape[0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", record)
        patch.setattr(torch.nn.functional, "linear", product)  # the large products of libraries
        yield found
