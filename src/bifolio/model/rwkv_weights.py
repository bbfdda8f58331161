"""The weights of a layer of RWKV-7 beside its projections of queries and outputs (`kernels.interface.Recurrence`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bifolio.kernels.interface import KernelSet, Linear, Recurrence


@dataclass(frozen=True, slots=True)
class LowRankProduct:
    """Two thin matrices, one after the other."""

    down: Linear  # [rank, d]
    up: Linear  # [values of all heads, rank]  with a bias, but for that of the gate

    def prepared(self, kernels: KernelSet) -> LowRankProduct:
        return LowRankProduct(kernels.prepare_linear(self.down), kernels.prepare_linear(self.up))


@dataclass(frozen=True, slots=True)
class RwkvWeights:
    """Six mixes of each token with the one before it, and the products that read them."""

    shift: Recurrence  # the inputs of queries, decays, keys, values, rates and gates, side by side
    key: Linear
    value: Linear  # behind the first layer also the first matrix of the product that mixes values
    decay: LowRankProduct
    rate: LowRankProduct
    gate: LowRankProduct
    mix: Linear | None  # the second matrix of the product that mixes values; None: in the first layer

    @property
    def linears(self) -> list[Linear]:
        found = [self.key, self.value]
        for product in (self.decay, self.rate, self.gate):
            found += [product.down, product.up]
        return found if self.mix is None else [*found, self.mix]

    def prepared(self, kernels: KernelSet) -> RwkvWeights:
        return replace(
            self,
            shift=kernels.prepare_recurrence(self.shift),
            key=kernels.prepare_linear(self.key),
            value=kernels.prepare_linear(self.value),
            decay=self.decay.prepared(kernels),
            rate=self.rate.prepared(kernels),
            gate=self.gate.prepared(kernels),
            mix=None if self.mix is None else kernels.prepare_linear(self.mix),
        )
