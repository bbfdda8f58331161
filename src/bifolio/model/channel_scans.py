"""Recurrences with a state for each channel: a convolution, parameters that its outputs give, and a scan."""

from __future__ import annotations

from itertools import pairwise

from bifolio.kernels.interface import Array, Batch, KernelSet, Recurrence, Storage
from bifolio.model.unit_tensors import UnitWeights
from bifolio.model.weights import SelectiveWeights


def selective_scan(
    r: Recurrence,
    own: SelectiveWeights,
    inputs: Array,  # |x|z|
    batch: Batch,
    kernels: KernelSet,
    storage: Storage | None,
) -> Array:
    """A convolution, parameters of the state that its outputs give, and the scan of the state."""
    x = kernels.recur(kernels.join_columns([(inputs, 0, r.channels)]), r, batch, storage)
    parameters, rank = kernels.linear(x, own.parameters), own.step.in_features
    ends = (0, rank, rank + r.key_size, rank + 2 * r.key_size)
    parts = [kernels.join_columns([(parameters, *span)]) for span in pairwise(ends)]
    if own.norms is not None:
        parts = [kernels.norm(part, norm) for part, norm in zip(parts, own.norms, strict=True)]
    rows = (inputs, r.channels, 2 * r.channels), (x, 0, r.channels), (kernels.linear(parts[0], own.step), 0, r.channels)
    states = ((part, 0, r.key_size) for part in parts[1:])
    return kernels.scan(kernels.join_columns([*rows, *states]), r, batch, storage)


def gated_units(
    r: Recurrence,
    own: UnitWeights,
    inputs: Array,  # |y|x|
    batch: Batch,
    kernels: KernelSet,
    storage: Storage | None,
) -> Array:
    """A convolution, two gates that its outputs give, and linear recurrent units, times the activation of y."""
    size = r.channels
    x = kernels.recur(kernels.join_columns([(inputs, size, 2 * size)]), r, batch, storage)
    gates = [kernels.head_linear(x, gate, 0) for gate in (own.recurrent_gate, own.input_gate)]
    states = kernels.scan(kernels.join_columns([(part, 0, size) for part in (x, *gates)]), r, batch, storage)
    return kernels.act_mul(kernels.join_columns([(inputs, 0, size), (states, 0, size)]), own.activation)
