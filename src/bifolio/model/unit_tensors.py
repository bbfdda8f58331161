"""The tensors of linear recurrent units with gates (RG-LRU): block-diagonal matrices of two gates, and decays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bifolio.arrays import array_namespace
from bifolio.config import RecurrentConfig
from bifolio.kernels.interface import Array, HeadLinear, KernelSet, Linear
from bifolio.model.fetch import Fetch, FetchVector, stacked_matrices
from bifolio.quant.tensor import QuantizedTensor

SHARPNESS = 8.0  # factor of the decays


@dataclass(frozen=True, slots=True)
class UnitNames:
    """Names behind the prefix of the layer."""

    recurrent_gate: str
    input_gate: str
    parameter: str  # with its suffix: the decay is -8 softplus(parameter)


@dataclass(frozen=True, slots=True)
class UnitWeights:
    """The gates of linear recurrent units; their biases are those of the `Recurrence`."""

    recurrent_gate: HeadLinear  # [size, size] of each block of channels
    input_gate: HeadLinear
    activation: str  # of the branch that multiplies the units

    def linears(self) -> list[Linear]:
        return [*self.recurrent_gate.heads, *self.input_gate.heads]

    def prepared(self, kernels: KernelSet) -> UnitWeights:
        return replace(
            self,
            recurrent_gate=kernels.prepare_head_linear(self.recurrent_gate),
            input_gate=kernels.prepare_head_linear(self.input_gate),
        )


def assemble_units(own: RecurrentConfig, names: UnitNames, prefix: str, fetch: Fetch, activation: str) -> UnitWeights:
    size = own.channels // own.gate_blocks

    def gate(name: str) -> HeadLinear:
        matrices = stacked_matrices(prefix + name, own.gate_blocks, (size, size), fetch)
        return HeadLinear(tuple(Linear((matrix,), (None,)) for matrix in matrices))

    return UnitWeights(gate(names.recurrent_gate), gate(names.input_gate), activation)


def unit_vectors(own: RecurrentConfig, names: UnitNames, prefix: str, vector: FetchVector) -> tuple[Array, Array]:
    """Decay f32[channels], and the biases of both gates f32[2 * channels]."""
    shape = own.gate_blocks, own.channels // own.gate_blocks
    stored = vector(prefix + names.parameter, (own.channels,))
    xp = array_namespace(stored)
    decay = -SHARPNESS * xp.logaddexp(stored, xp.zeros_like(stored))
    biases = [vector(f"{prefix}{name}.bias", shape) for name in (names.recurrent_gate, names.input_gate)]
    return decay, xp.concat([bias.reshape(-1) for bias in biases])


def unit_parts(
    own: RecurrentConfig, names: UnitNames, units: UnitWeights, decay: Array, bias: Array
) -> Iterator[tuple[str, tuple[QuantizedTensor | Array, ...] | Array]]:
    """Names and tensors, as files store them; several matrices are one tensor."""
    shape = own.gate_blocks, own.channels // own.gate_blocks
    biases = np.split(np.asarray(bias), 2)
    gates = (names.recurrent_gate, units.recurrent_gate), (names.input_gate, units.input_gate)
    for (name, gate), values in zip(gates, biases, strict=True):
        yield name + ".weight", tuple(head.parts[0] for head in gate.heads)
        yield name + ".bias", values.reshape(shape)
    steps = np.asarray(decay, np.float64) / -SHARPNESS
    yield names.parameter, (steps + np.log(-np.expm1(-steps))).astype(np.float32)
