"""The tensors of recurrent layers: their names in files, and the weights by role."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bifolio.arrays import array_namespace
from bifolio.config import ModelConfig, RecurrentConfig
from bifolio.kernels.interface import Array, Linear, Norm, Recurrence
from bifolio.model.fetch import Fetch, FetchVector
from bifolio.model.keyed_tensors import KeyedNames, assemble_keyed
from bifolio.model.rope_frequencies import lightning_slopes
from bifolio.model.rwkv_tensors import RwkvNames, assemble_rwkv
from bifolio.model.selective_tensors import SelectiveNames, assemble_selective, selective_decay
from bifolio.model.unit_tensors import UnitNames, assemble_units, unit_vectors
from bifolio.model.weights import RecurrentWeights


@dataclass(frozen=True, slots=True)
class RecurrentNames:
    """Names of the tensors of a recurrent layer, without its prefix; those that a family lacks are empty.

    The input projection may be several matrices, each of them with a number of consecutive pieces of
    `RecurrentConfig.input_sizes`; a family rearranges the rows of files in another order.
    """

    input: tuple[tuple[str, int], ...] = ()  # (name, number of pieces), in order
    conv: str | tuple[str, str, str] = ""  # three names: of q, k and v
    output: str = ""
    decay: str = ""  # with its suffix
    bias: str = ""  # with its suffix
    skip: str = ""  # with its suffix
    norm: str = ""
    conv_axis: bool = False  # the convolution is stored as [channels, 1, width]
    decay_log: bool = False  # the file has log(-decay)
    decay_positive: bool = False  # the file has -decay
    column_vectors: bool = False  # decay and skip are stored as [heads, 1]
    decay_axes: bool = False  # decay is stored as [1, 1, heads, 1]
    grouped_norm: bool = False  # the norm is stored as [groups, size / groups]
    selective: SelectiveNames | None = None
    keyed: KeyedNames | None = None
    units: UnitNames | None = None
    rwkv: RwkvNames | None = None

    @property
    def conv_names(self) -> tuple[str, ...]:
        """Names of the tensors of the convolution, without `.weight`."""
        return tuple(name for name in ((self.conv,) if isinstance(self.conv, str) else self.conv) if name)

    def conv_parts(self, own: RecurrentConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of each tensor of the convolution, in the order of its channels."""
        keys, names = own.groups * own.key_size, self.conv_names
        sizes = (own.channels,) if len(names) == 1 else (keys, keys, own.inner_size)
        ends = (1, own.width) if self.conv_axis else (own.width,)
        return tuple((name, (size, *ends)) for name, size in zip(names, sizes, strict=True))

    def vector_shape(self, own: RecurrentConfig) -> tuple[int, ...]:
        """Of decay and skip; the bias is always a vector."""
        if self.decay_axes:
            return (1, 1, own.heads, 1)
        return (own.heads, 1) if self.column_vectors else (own.heads,)

    def norm_shape(self, own: RecurrentConfig) -> tuple[int, ...]:
        if not self.grouped_norm:
            return (own.norm_size,)
        return (own.norm_groups, own.norm_size // own.norm_groups)


def assemble_recurrence(
    config: ModelConfig, names: RecurrentNames, layer: int, prefix: str, fetch: Fetch, vector: FetchVector
) -> RecurrentWeights | None:
    """The recurrence of a layer; None: it has none."""
    own = config.recurrent
    if own is None or not config.layers[layer].recurrent:
        return None
    if names.rwkv is not None:
        return assemble_rwkv(config, own, names.rwkv, layer, prefix, fetch, vector)
    heads, d = names.vector_shape(own), config.hidden_size
    is_selective = own.kind == "selective"

    def flat(name: str, shape: tuple[int, ...]) -> Array:
        return vector(prefix + name, shape).reshape(-1)

    def linear(parts: tuple[tuple[str, int], ...], inputs: int) -> Linear:
        return Linear(
            tuple(fetch(f"{prefix}{name}.weight", (size, inputs)) for name, size in parts),
            tuple(vector(f"{prefix}{name}.bias", (size,)) if own.projection_bias else None for name, size in parts),
        )

    decay, bias = None, flat(names.bias, (own.bias_size,)) if names.bias and own.vectors else None
    if names.decay and own.vectors:
        decay = flat(names.decay, heads)
        decay = -array_namespace(decay).exp(decay) if names.decay_log else -decay if names.decay_positive else decay
    if is_selective:
        decay = selective_decay(vector(prefix + names.decay, (own.channels, own.key_size)), names.decay_log)
    if own.kind == "lightning":
        decay = -lightning_slopes(own.heads, layer, config.num_layers)
    if names.units is not None:
        decay, bias = unit_vectors(own, names.units, prefix, vector)
    has_skip = bool(names.skip) and (own.kind == "mamba" or is_selective)
    recurrence = Recurrence(
        kind=own.kind,
        layer=config.recurrent_layers.index(layer),
        width=own.width,
        channels=own.channels,
        heads=own.heads,
        groups=own.groups,
        key_size=own.key_size,
        value_size=own.value_size,
        conv_weight=_taps(own, names, prefix, vector),
        conv_bias=flat(f"{names.conv}.bias", (own.channels,)) if own.conv_bias else None,
        decay=decay,
        bias=bias,
        skip=flat(names.skip, (own.channels,) if is_selective else heads) if has_skip else None,
        norm=Norm(flat(names.norm + ".weight", names.norm_shape(own)), None, own.norm_eps or config.norm_eps, False)
        if own.norm_size
        else None,
        norm_first=own.norm_first,
        norm_groups=own.norm_groups,
        dt_limits=own.dt_limits,
        tiled=own.tiled,
        rate_scale=own.rate_scale,
        decay_bound=own.decay_bound,
    )
    return RecurrentWeights(
        linear(_input_parts(names, own), d),
        recurrence,
        linear(((names.output, d),), own.inner_size),
        None if names.selective is None else assemble_selective(own, names.selective, prefix, fetch, vector),
        None if names.keyed is None else assemble_keyed(own, names.keyed, prefix, fetch),
        None if names.units is None else assemble_units(own, names.units, prefix, fetch, config.activation),
    )


def _taps(own: RecurrentConfig, names: RecurrentNames, prefix: str, vector: FetchVector) -> Array:
    """f32[channels, width]; one tap of ones where there is no convolution."""
    if own.width == 1:
        return np.ones((own.channels, 1), np.float32)
    parts = [vector(f"{prefix}{name}.weight", shape) for name, shape in names.conv_parts(own)]
    rows = parts[0] if len(parts) == 1 else array_namespace(parts[0]).concat(parts, axis=0)
    return rows.reshape(own.channels, own.width)


def _input_parts(names: RecurrentNames, own: RecurrentConfig) -> tuple[tuple[str, int], ...]:
    """Name and rows of each matrix of the input projection."""
    sizes, parts = list(own.input_sizes), []
    for name, count in names.input:
        parts.append((name, sum(sizes[:count])))
        del sizes[:count]
    return tuple(parts)
