"""The weights of a keyed recurrence that give a and z (`kernels.interface.Recurrence`)."""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.kernels.interface import KernelSet, Linear


@dataclass(frozen=True, slots=True)
class KeyedWeights:
    """The second halves of two products of low rank; the first halves belong to the input projection."""

    decay: Linear  # [heads * key_size, rank]
    gate: Linear  # [heads * value_size, rank]

    @property
    def linears(self) -> list[Linear]:
        return [self.decay, self.gate]

    def prepared(self, kernels: KernelSet) -> KeyedWeights:
        return KeyedWeights(kernels.prepare_linear(self.decay), kernels.prepare_linear(self.gate))
