"""Deferred values, so that the operation that uses them can be fused with them.

The network is written in small operations. With few rows each is bound by its launch, so `norm` and `linear` return
deferred values, and the operation that consumes them launches one fused kernel:

    norm → linear                          the norm is computed while the weights are read
    linear → act_mul                       gate and up are multiplied before the result is written
    linear → add                           the residual is added in the product's epilogue
    norm → experts                         (one row) as for a product
    experts → add                          the residual is added with the last expert
    add → norm                             (many rows) one pass over the sum
    linear → adapters → act_mul            gate and up are changed and multiplied in one pass
    linear → adapters → add                the changes are added behind the residual
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from bifolio.kernels.interface import Linear, Norm


@dataclass(slots=True, eq=False)
class Sum:
    """x + delta."""

    x: torch.Tensor
    delta: torch.Tensor
    value: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return int(self.x.shape[0])

    def tensor(self) -> torch.Tensor:
        if self.value is None:
            self.value = self.x + self.delta
        return self.value


@dataclass(slots=True, eq=False)
class Normed:
    """The norm of x."""

    x: torch.Tensor
    norm: Norm
    compute: Callable[[torch.Tensor, Norm], torch.Tensor]
    value: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return int(self.x.shape[0])

    def tensor(self) -> torch.Tensor:
        if self.value is None:
            self.value = self.compute(self.x, self.norm)
        return self.value


@dataclass(slots=True, eq=False)
class Product:
    """x, optionally normed, times the weights of a linear layer."""

    x: torch.Tensor | Normed
    linear: Linear
    compute: Callable[[Product, str | None, torch.Tensor | None], torch.Tensor]
    value: torch.Tensor | None = field(default=None)
    is_adapted: bool = False  # `compute` adds the changes of adapters

    @property
    def rows(self) -> int:
        return int(self.x.shape[0]) if isinstance(self.x, torch.Tensor) else self.x.rows

    def tensor(self) -> torch.Tensor:
        if self.value is None:
            self.value = self.compute(self, None, None)
        return self.value


@dataclass(slots=True, eq=False)
class Mixture:
    """The weighted sum of the experts of each row."""

    compute: Callable[[torch.Tensor | None], torch.Tensor]  # plus a residual
    rows: int
    value: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        if self.value is None:
            self.value = self.compute(None)
        return self.value


Deferred = Sum | Normed | Product | Mixture


def tensor(value: torch.Tensor | Deferred) -> torch.Tensor:
    """The tensor of a value, computed now if it is deferred."""
    return value if isinstance(value, torch.Tensor) else value.tensor()
