"""The part of a recurrent layer that one rank of tensor parallelism holds: some of its heads, or of its channels.

    conv   channels; rows of b, c and x
    delta  heads with the groups of their keys; rows of q, k, v, z, beta and a
    keyed  heads; rows of q, k, v and beta, and of the second halves of the products of low rank: the first are on each
    mamba  heads with the groups of B and C; rows of z, x, b, c and dt, and whole groups of the norm; lightning the same

A group that the heads of several ranks share is on each of them. The recurrence of a head reads nothing of other heads,
so a rank computes the bits of one process; the output projection joins the heads (`model.shards`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from bifolio.config import RecurrentConfig
from bifolio.errors import ConfigError
from bifolio.kernels.interface import Array, Linear, Norm, Recurrence
from bifolio.model.keyed_weights import KeyedWeights
from bifolio.quant.tensor import QuantizedTensor

Span = tuple[int, int]  # [start, stop)


def fits_groups(heads: int, groups: int, size: int) -> bool:
    """Whether `size` ranks can share heads that belong to groups: whole groups each, or evenly many heads of one."""
    return size <= groups or (size % groups == 0 and heads % size == 0)


def group_spans(heads: int, groups: int, size: int, cut: list[Span]) -> tuple[list[Span], list[Span]]:
    """The heads and the groups of each rank. `cut`: the groups in `size` spans, or the heads, if ranks share groups."""
    if size > groups:
        each = size // groups  # ranks of one group
        return cut, [(rank // each, rank // each + 1) for rank in range(size)]
    count = heads // groups
    return [(start * count, stop * count) for start, stop in cut], cut


class RecurrentPart(NamedTuple):
    """The heads and groups of a rank, or its channels."""

    heads: Span
    groups: Span
    channels: Span = (0, 0)  # of a convolution alone


def check_recurrence(own: RecurrentConfig, size: int) -> None:
    """Raise ConfigError if `size` ranks cannot share the recurrent layers."""
    if size == 1:
        return
    if own.by_channel:
        raise ConfigError(
            "tensor_parallel_size must be 1: selective recurrent layers (Mamba) and linear recurrent units are not "
            "shared by ranks"
        )
    if own.kind == "rwkv":
        raise ConfigError("tensor_parallel_size must be 1: recurrent layers of RWKV are not shared by ranks")
    if own.kind == "conv":
        if own.channels < size:
            raise ConfigError(f"{own.channels} channels cannot be shared by tensor_parallel_size={size} processes")
        return
    if not fits_groups(own.heads, own.groups, size):
        fitting = ", ".join(
            str(count) for count in range(1, own.heads + 1) if fits_groups(own.heads, own.groups, count)
        )
        raise ConfigError(
            f"{own.heads} recurrent heads in {own.groups} groups cannot be shared by tensor_parallel_size={size} "
            f"processes: use one of {fitting}"
        )
    if own.tiled and own.heads != own.groups:
        raise ConfigError(
            "tensor_parallel_size must be 1 for the order of recurrent heads in this file: use the folder of the model"
        )
    is_even = size > own.groups or own.groups % size == 0
    if own.norms_together and (own.norm_groups % size or not is_even):
        raise ConfigError(
            f"tensor_parallel_size={size} must divide the {own.norm_groups} groups that the recurrent layers are "
            f"normed in: use 1 or another divisor"
        )


def config_part(own: RecurrentConfig, part: RecurrentPart, size: int) -> RecurrentConfig:
    """The configuration of a rank's part: the sizes of its states."""
    if own.kind == "conv":
        return replace(own, channels=part.channels[1] - part.channels[0])
    heads, groups = part.heads[1] - part.heads[0], part.groups[1] - part.groups[0]
    channels = heads * own.value_size + 2 * groups * own.key_size
    is_delta = own.kind in ("delta", "keyed")
    norm_groups = own.norm_groups // size if own.norms_together else own.norm_groups if is_delta else 1
    return replace(own, heads=heads, groups=groups, channels=channels, norm_groups=norm_groups)


def input_rows(recurrence: Recurrence, part: RecurrentPart, rank: int = 0) -> list[Span]:
    """The rows of a rank in the input projection; `rank`: of the low-rank products of a keyed recurrence, or 0."""
    if recurrence.kind == "conv":
        return [_shifted(part.channels, 1, number * recurrence.channels) for number in range(3)]
    inner, keys = recurrence.heads * recurrence.value_size, recurrence.groups * recurrence.key_size
    value, key, one = recurrence.value_size, recurrence.key_size, 1
    widths = {
        "delta": ((keys, key), (keys, key), (inner, value), (inner, value), (recurrence.heads, one),
                  (recurrence.heads, one)),
        "keyed": ((keys, key), (keys, key), (inner, value), (recurrence.heads, one)) if rank else
                 ((keys, key), (keys, key), (inner, value), (inner, value), (recurrence.heads, one), (keys, key)),
        "mamba": ((inner, value), (inner, value), (keys, key), (keys, key), (recurrence.heads, one)),
        "lightning": ((inner, value), (inner, value), (keys, key), (keys, key)),
    }[recurrence.kind]  # fmt: skip
    by_group = (0, 1) if recurrence.has_delta_rule else (2, 3)
    rows, first = [], 0
    for number, (width, unit) in enumerate(widths):
        rows.append(_shifted(part.groups if number in by_group else part.heads, unit, first))
        first += width
    return [*rows, (first, first + 2 * rank)] if recurrence.kind == "keyed" and rank else rows


def shard_recurrence(recurrence: Recurrence, part: RecurrentPart, own: RecurrentConfig) -> Recurrence:
    """The rank's part of a recurrence; `own` is that of its configuration."""
    channels, heads = _channels(recurrence, part), slice(*part.heads)

    def of_heads(values: Array | None) -> Array | None:
        return None if values is None else values[heads]

    bias = recurrence.conv_bias
    if recurrence.kind == "conv":
        return replace(
            recurrence,
            channels=own.channels,
            conv_weight=recurrence.conv_weight[channels],
            conv_bias=None if bias is None else bias[channels],
        )
    return replace(
        recurrence,
        channels=own.channels,
        heads=own.heads,
        groups=own.groups,
        norm_groups=own.norm_groups,
        conv_weight=recurrence.conv_weight[channels],
        conv_bias=None if bias is None else bias[channels],
        decay=of_heads(recurrence.decay),
        bias=_bias_part(recurrence, part),
        skip=of_heads(recurrence.skip),
        norm=_norm_part(recurrence, part),
    )


def _bias_part(recurrence: Recurrence, part: RecurrentPart) -> Array | None:
    """The biases of the steps of a rank's heads."""
    if recurrence.bias is None:
        return None
    each = len(recurrence.bias) // recurrence.heads
    return recurrence.bias[slice(*_shifted(part.heads, each, 0))]


def shard_keyed(weights: KeyedWeights, recurrence: Recurrence, part: RecurrentPart) -> KeyedWeights:
    """The rows of a rank's heads in the second halves of the products of low rank."""

    def rows(linear: Linear, each: int) -> Linear:
        own = slice(*_shifted(part.heads, each, 0))
        parts = [held.select_rows(own) if isinstance(held, QuantizedTensor) else held[own] for held in linear.parts]
        return replace(linear, parts=tuple(parts))

    return KeyedWeights(rows(weights.decay, recurrence.key_size), rows(weights.gate, recurrence.value_size))


def _norm_part(recurrence: Recurrence, part: RecurrentPart) -> Norm | None:
    """The norm of a rank's heads; that of each head alone is the same on every rank."""
    norm = recurrence.norm
    if norm is None or recurrence.has_delta_rule:
        return norm
    rows = slice(*_shifted(part.heads, recurrence.value_size, 0))
    weight = norm.weight if len(norm.weight) < recurrence.heads * recurrence.value_size else norm.weight[rows]
    return replace(norm, weight=weight, bias=None if norm.bias is None else norm.bias[rows])


def _channels(recurrence: Recurrence, part: RecurrentPart) -> np.ndarray:
    """i64[n]: the channels of a rank's convolution, in its order."""
    if recurrence.kind == "conv":
        return np.arange(*part.channels)
    inner, keys = recurrence.heads * recurrence.value_size, recurrence.groups * recurrence.key_size
    values = _shifted(part.heads, recurrence.value_size, 2 * keys if recurrence.has_delta_rule else 0)
    first = 0 if recurrence.has_delta_rule else inner
    by_group = [_shifted(part.groups, recurrence.key_size, first + number * keys) for number in range(2)]
    spans = [*by_group, values] if recurrence.has_delta_rule else [values, *by_group]
    return np.concatenate([np.arange(start, stop) for start, stop in spans])


def _shifted(span: Span, unit: int, first: int) -> Span:
    return first + span[0] * unit, first + span[1] * unit
