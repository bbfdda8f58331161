"""One layer of a network, where layers may differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from bifolio.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The parts of a layer and their sizes; None: that of the model.

    A layer may have both attention and a recurrence (Falcon-H1), or neither (Nemotron-H).
    """

    attention: bool = True
    recurrent: bool = False
    mlp: bool = True  # a plain MLP, or experts if the model has any
    dense: bool = False  # a plain MLP in a model with experts
    window: int | None = None  # sliding window in tokens, itself included; None: the whole context
    rope: int | None = 0  # index into `ModelConfig.ropes`; None: no positions
    head_dim: int | None = None
    kv_heads: int | None = None
    mlp_size: int | None = None
    cutoff: float | None = None  # gates that many deviations above the mean are kept; None: all
    kv_source: int | None = None  # an earlier layer whose keys and values are read; None: its own
    keys_as_values: bool = False  # values are the keys, before norm and rope


def layers_of(count: int, **values: Sequence[Any]) -> tuple[LayerConfig, ...]:
    """Layers whose fields have these values, one for every layer, or none: the usual. Equal layers are one object."""
    given = {name: own for name, own in values.items() if own}
    for name, own in given.items():
        if len(own) != count:
            raise ConfigError(f"{name} has {len(own)} entries for {count} layers")
    known: dict[LayerConfig, LayerConfig] = {}
    layers = (LayerConfig(**{name: own[layer] for name, own in given.items()}) for layer in range(count))
    return tuple(known.setdefault(layer, layer) for layer in layers)


USUAL = {each.name: each.default for each in fields(LayerConfig)}  # values of a layer of most networks
