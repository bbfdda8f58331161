"""The tensors of layers of RWKV-7: their names in files, and the weights by role."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from bifolio.arrays import array_namespace
from bifolio.config import ModelConfig, RecurrentConfig
from bifolio.kernels.interface import Array, Linear, Norm, Recurrence
from bifolio.model.fetch import Fetch, FetchVector, Tensor
from bifolio.model.rwkv_weights import LowRankProduct, RwkvWeights
from bifolio.model.weights import RecurrentWeights

MIXES = 6  # of the inputs of queries, decays, keys, values, rates and gates, in this order


@dataclass(frozen=True, slots=True)
class LowRankNames:
    """The two matrices of a product, and its bias with a suffix; "": it has none."""

    down: str
    up: str
    bias: str = ""


@dataclass(frozen=True, slots=True)
class RwkvNames:
    """Names behind the prefix of the layer; those of vectors have a suffix."""

    shift: tuple[str, ...]  # one of each mix, or of all: vectors with two dimensions more
    query: str
    key: str
    value: str
    output: str
    factors: tuple[str, str, str]  # of removed keys, of keys and of the bonus
    norm: str
    decay: LowRankNames
    rate: LowRankNames
    gate: LowRankNames
    mix: LowRankNames
    mlp_shift: str
    bonus_by_head: bool = False  # the factors of the bonus are stored as [heads, key_size]


def shift_of(config: ModelConfig, layer: int, factors: Array, column: int) -> Recurrence:
    """A mix of each token with the one before it; `factors`: [mixes, d]."""
    d = config.hidden_size
    return Recurrence("shift", config.recurrent_layers.index(layer), 2, d, factors=factors, column=column, window=2 * d)


def assemble_mlp_shift(
    config: ModelConfig, names: RwkvNames | None, layer: int, prefix: str, vector: FetchVector
) -> Recurrence | None:
    """The mix of tokens in front of the MLP; None: the network has none."""
    if names is None or not config.layers[layer].recurrent:
        return None
    d = config.hidden_size
    return shift_of(config, layer, vector(prefix + names.mlp_shift, (d,)).reshape(1, d), d)


def assemble_rwkv(
    config: ModelConfig,
    own: RecurrentConfig,
    names: RwkvNames,
    layer: int,
    prefix: str,
    fetch: Fetch,
    vector: FetchVector,
) -> RecurrentWeights:
    d, inner = config.hidden_size, own.inner_size

    def matrix(name: str, rows: int, columns: int) -> Linear:
        return Linear((fetch(f"{prefix}{name}.weight", (rows, columns)),), (None,))

    def last(product: LowRankNames, rank: int) -> Linear:
        bias = vector(prefix + product.bias, (inner,)) if product.bias else None
        return replace(matrix(product.up, inner, rank), biases=(bias,))

    def low_rank(product: LowRankNames, rank: int) -> LowRankProduct:
        return LowRankProduct(matrix(product.down, rank, d), last(product, rank))

    decay, rate, gate, mix = own.ranks
    value, is_first = matrix(names.value, inner, d), layer == config.recurrent_layers[0]
    if not is_first:
        value = Linear((*value.parts, *matrix(names.mix.down, mix, d).parts), (None, None))
    weights = RwkvWeights(
        shift=shift_of(config, layer, _mixes(names, d, prefix, vector), 0),
        key=matrix(names.key, inner, d),
        value=value,
        decay=low_rank(names.decay, decay),
        rate=low_rank(names.rate, rate),
        gate=low_rank(names.gate, gate),
        mix=None if is_first else last(names.mix, mix),
    )
    recurrence = _recurrence(config, own, names, layer, prefix, vector)
    return RecurrentWeights(matrix(names.query, inner, d), recurrence, matrix(names.output, d, inner), rwkv=weights)


def _recurrence(
    config: ModelConfig, own: RecurrentConfig, names: RwkvNames, layer: int, prefix: str, vector: FetchVector
) -> Recurrence:
    inner = own.inner_size
    shapes = [(inner,), (inner,), (own.heads, own.key_size) if names.bonus_by_head else (inner,)]
    factors = [vector(prefix + name, shape).reshape(inner) for name, shape in zip(names.factors, shapes, strict=True)]
    weight, bias = (vector(f"{prefix}{names.norm}.{kind}", (inner,)) for kind in ("weight", "bias"))
    number = config.recurrent_layers.index(layer)
    return Recurrence(
        "rwkv", number, own.width, own.channels, own.heads, own.groups, own.key_size, own.value_size,
        factors=array_namespace(factors[0]).stack(factors), mixes_values=number > 0,
        norm=Norm(weight, bias, own.norm_eps, True),
    )  # fmt: skip


def _mixes(names: RwkvNames, d: int, prefix: str, vector: FetchVector) -> Array:
    """f32[mixes, d]"""
    count = MIXES // len(names.shift)
    rows = [vector(prefix + name, (count, 1, 1, d)[count == 1 :]).reshape(count, d) for name in names.shift]
    return rows[0] if len(rows) == 1 else array_namespace(rows[0]).concat(rows, axis=0)


def rwkv_matrices(names: RwkvNames, weights: RecurrentWeights) -> Iterator[tuple[str, Tensor]]:
    """The projections, with their full names behind the prefix."""
    if weights.rwkv is None:
        return
    products = (names.query, weights.input), (names.key, weights.rwkv.key), (names.value, weights.rwkv.value)
    for name, linear in (*products, (names.output, weights.output)):
        yield f"{name}.weight", linear.parts[0]


def rwkv_states(names: RwkvNames, own: RecurrentConfig, weights: RecurrentWeights) -> Iterator[tuple[str, Tensor]]:
    """All other tensors, which stay dense: mixes, products of low rank, factors and the norm."""
    r, rwkv = weights.recurrence, weights.rwkv
    if rwkv is None or r.norm is None:
        return
    count = MIXES // len(names.shift)
    mixes = np.asarray(rwkv.shift.factors).reshape(len(names.shift), count, 1, 1, -1)
    yield from ((name, mix[0] if count == 1 else mix) for name, mix in zip(names.shift, mixes, strict=True))
    products = [(names.decay, rwkv.decay), (names.rate, rwkv.rate), (names.gate, rwkv.gate)]
    if rwkv.mix is not None:
        products.append((names.mix, LowRankProduct(Linear(rwkv.value.parts[1:], (None,)), rwkv.mix)))
    for own_names, product in products:
        yield f"{own_names.down}.weight", product.down.parts[0]
        yield f"{own_names.up}.weight", product.up.parts[0]
        if own_names.bias:
            yield own_names.bias, np.asarray(product.up.biases[0])
    shapes = (-1,), (-1,), ((own.heads, own.key_size) if names.bonus_by_head else (-1,))
    for name, values, shape in zip(names.factors, np.asarray(r.factors), shapes, strict=True):
        yield name, values.reshape(shape)
    yield f"{names.norm}.weight", np.asarray(r.norm.weight)
    yield f"{names.norm}.bias", np.asarray(r.norm.bias)
