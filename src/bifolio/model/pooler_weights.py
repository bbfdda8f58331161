"""The weights between pooled hidden states and the vector or the scores of a text: a chain of small dense layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bifolio.kernels.interface import Array, KernelSet, Linear, Norm
from bifolio.quant.tensor import QuantizedTensor


@dataclass(frozen=True, slots=True)
class PoolerLayer:
    """norm(act(linear(x)))."""

    linear: Linear
    activation: str = ""  # "": none
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class PoolerWeights:
    """Dense modules of a sentence encoder, or the head of a classifier."""

    layers: tuple[PoolerLayer, ...]

    def matrices(self) -> list[QuantizedTensor | Array]:
        return [part for layer in self.layers for part in layer.linear.parts]

    def changed(self, linears: Mapping[int, Linear]) -> PoolerWeights:
        """The layers with these matrices in place of their own, by number."""
        layers = enumerate(self.layers)
        return PoolerWeights(tuple(replace(layer, linear=linears.get(n, layer.linear)) for n, layer in layers))

    def prepared(self, kernels: KernelSet) -> PoolerWeights:
        return PoolerWeights(
            tuple(
                replace(
                    layer,
                    linear=kernels.prepare_linear(layer.linear),
                    norm=None if layer.norm is None else kernels.prepare_norm(layer.norm),
                )
                for layer in self.layers
            )
        )


def through(pooler: PoolerWeights, x: Array, kernels: KernelSet) -> Array:
    """[n, out] of pooled hidden states [n, d]."""
    for layer in pooler.layers:
        x = kernels.linear(x, layer.linear)
        x = kernels.act(x, layer.activation) if layer.activation else x
        x = x if layer.norm is None else kernels.norm(x, layer.norm)
    return x
