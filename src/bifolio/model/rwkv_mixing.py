"""The part of a layer of RWKV-7 that reads other tokens, from its six mixes of tokens to the output of its heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bifolio.kernels.interface import Array, Batch, KernelSet, Recurrence, Storage
from bifolio.model.rwkv_weights import LowRankProduct, RwkvWeights

Columns = tuple[Array, int, int]  # [start, stop) of rows


def mixed_inputs(own: RwkvWeights, x: Array, batch: Batch, kernels: KernelSet, storage: Storage | None) -> list[Array]:
    """The inputs of queries, decays, keys, values, rates and gates."""
    rows, d = kernels.recur(x, own.shift, batch, storage), own.shift.channels
    ends = range(0, own.shift.out_features + 1, d)
    return [kernels.join_columns([(rows, *span)]) for span in pairwise(ends)]


def head_values(own: RwkvWeights, x: Array, kernels: KernelSet, size: int) -> tuple[Columns, Array | None]:
    """The values of all heads, and behind the first layer how far they are mixed with those of the first."""
    rows = kernels.linear(x, own.value)
    values = rows, 0, size
    if own.mix is None:
        return values, None
    low = kernels.join_columns([(rows, size, own.value.out_features)])
    return values, kernels.linear(low, own.mix)


def mixed_tokens(
    own: RwkvWeights,
    recurrence: Recurrence,
    query: Array,
    inputs: Sequence[Array],
    first: Columns | None,
    batch: Batch,
    kernels: KernelSet,
    storage: Storage | None,
) -> tuple[Array, Columns]:
    """The output of the heads [t, values], and the values of the first layer; `first`: None in that layer."""
    size = recurrence.out_features
    _, decay, key, value, rate, gate = inputs
    values, amount = head_values(own, value, kernels, size)
    parts = [query, low_rank(own.decay, decay, "tanh", kernels), kernels.linear(key, own.key)]
    columns: list[Columns] = [*((part, 0, size) for part in parts), values]
    parts = [low_rank(own.rate, rate, "", kernels), low_rank(own.gate, gate, "sigmoid", kernels)]
    columns += [(part, 0, size) for part in parts]
    if amount is not None and first is not None:
        columns += [(amount, 0, size), first]
    rows = kernels.join_columns(columns)
    return kernels.recur(rows, recurrence, batch, storage), first or values


def low_rank(product: LowRankProduct, x: Array, activation: str, kernels: KernelSet) -> Array:
    hidden = kernels.linear(x, product.down)
    return kernels.linear(kernels.act(hidden, activation) if activation else hidden, product.up)
