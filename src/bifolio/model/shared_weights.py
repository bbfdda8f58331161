"""The weights of a layer that uses a shared block: those that the layer does not share (`SharedBlockConfig`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from bifolio.kernels.interface import Array, KernelSet, Linear, Norm
from bifolio.quant.tensor import QuantizedTensor

Prepare = Callable[[Linear], Linear]


@dataclass(frozen=True, slots=True)
class AddedProducts:
    """Products of low rank that are added to those of a shared matrix with the same input."""

    down: Linear  # [products * rank, inputs]
    up: tuple[Linear, ...]  # [rows, rank] of each product

    @property
    def linears(self) -> list[Linear]:
        return [self.down, *self.up]

    def prepared(self, kernels: KernelSet) -> AddedProducts:
        return AddedProducts(kernels.prepare_linear(self.down), tuple(map(kernels.prepare_linear, self.up)))


@dataclass(frozen=True, slots=True)
class SharedUse:
    """One use of a shared block, whose attention and MLP are those of the layer."""

    norm: Norm  # [2 * d]  of the residual stream and the embeddings side by side
    output: Linear  # [d, d]  of the block
    up: AddedProducts  # to the first products of the MLP
    qkv: AddedProducts | None

    @property
    def linears(self) -> list[Linear]:
        return [self.output, *self.up.linears, *([] if self.qkv is None else self.qkv.linears)]

    def matrices(self) -> list[QuantizedTensor | Array]:
        return [part for linear in self.linears for part in linear.parts]

    def prepared(self, kernels: KernelSet) -> SharedUse:
        return SharedUse(
            kernels.prepare_norm(self.norm),
            kernels.prepare_linear(self.output),
            self.up.prepared(kernels),
            None if self.qkv is None else self.qkv.prepared(kernels),
        )


def with_low_rank(y: Array, x: Array, added: AddedProducts, kernels: KernelSet) -> Array:
    """The product `y` of `x` with the added products of low rank."""
    rows = kernels.linear(x, added.down)
    rank = added.up[0].in_features
    if len(added.up) == 1:
        return kernels.add(y, kernels.linear(rows, added.up[0]))
    parts = []
    for place, up in enumerate(added.up):
        own = kernels.join_columns([(rows, place * rank, (place + 1) * rank)])
        parts.append((kernels.linear(own, up), 0, up.out_features))
    return kernels.add(y, kernels.join_columns(parts))


def prepared_once(kernels: KernelSet) -> Prepare:
    """A function that prepares linear layers of the same matrices once."""
    known: dict[tuple[int, ...], tuple[Linear, Linear]] = {}

    def prepare(linear: Linear) -> Linear:
        if not linear.parts:
            return linear
        key = tuple(map(id, linear.parts))
        if key not in known:
            known[key] = linear, kernels.prepare_linear(linear)  # `linear` keeps the ids of its matrices
        return replace(known[key][1], site=linear.site)

    return prepare
