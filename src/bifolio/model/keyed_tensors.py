"""The tensors of keyed recurrent layers: the second halves of the low-rank products that give a and z."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bifolio.config import RecurrentConfig
from bifolio.kernels.interface import Linear
from bifolio.model.fetch import Fetch
from bifolio.model.keyed_weights import KeyedWeights


@dataclass(frozen=True, slots=True)
class KeyedNames:
    """Names behind the prefix of the layer."""

    decay: str
    gate: str


def assemble_keyed(own: RecurrentConfig, names: KeyedNames, prefix: str, fetch: Fetch) -> KeyedWeights:
    def linear(name: str, rows: int) -> Linear:
        return Linear((fetch(f"{prefix}{name}.weight", (rows, own.step_rank)),), (None,))

    return KeyedWeights(linear(names.decay, own.heads * own.key_size), linear(names.gate, own.inner_size))


def keyed_parts(names: KeyedNames, weights: KeyedWeights) -> Iterator[tuple[str, Linear]]:
    """Names and weights, as files store them."""
    yield names.decay, weights.decay
    yield names.gate, weights.gate
