"""The tensors of selective recurrent layers (Mamba): steps, inputs and outputs of the state by token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bifolio.arrays import array_namespace
from bifolio.config import RecurrentConfig
from bifolio.kernels.interface import Array, Linear, Norm
from bifolio.model.fetch import Fetch, FetchVector
from bifolio.model.weights import SelectiveWeights


@dataclass(frozen=True, slots=True)
class SelectiveNames:
    """Names behind the prefix of the layer."""

    parameters: str
    step: str
    norms: tuple[str, str, str] = ("", "", "")  # of dt, b and c


def selective_decay(stored: Array, is_log: bool) -> Array:
    """f32[key_size, channels] from [channels, key_size]."""
    xp = array_namespace(stored)
    decay = -xp.exp(stored) if is_log else stored
    return decay.T.contiguous() if hasattr(decay, "contiguous") else np.ascontiguousarray(decay.T)


def assemble_selective(
    own: RecurrentConfig, names: SelectiveNames, prefix: str, fetch: Fetch, vector: FetchVector
) -> SelectiveWeights:
    sizes = (own.step_rank, own.key_size, own.key_size)

    def norm(name: str, size: int) -> Norm:
        weighted = own.step_norms == "weighted"
        weight = vector(f"{prefix}{name}.weight", (size,)) if weighted else np.ones(size, np.float32)
        return Norm(weight, None, own.step_norm_eps)

    norms = None
    if own.step_norms != "none":
        dt, b, c = (norm(name, size) for name, size in zip(names.norms, sizes, strict=True))
        norms = dt, b, c
    step = fetch(f"{prefix}{names.step}.weight", (own.channels, own.step_rank))
    return SelectiveWeights(
        Linear((fetch(f"{prefix}{names.parameters}.weight", (sum(sizes), own.channels)),), (None,)),
        Linear((step,), (vector(f"{prefix}{names.step}.bias", (own.channels,)),)),
        norms,
    )


def selective_parts(
    names: SelectiveNames, weights: SelectiveWeights, weighted: bool
) -> Iterator[tuple[str, Linear | Norm]]:
    """Names and weights, as files store them."""
    yield names.parameters, weights.parameters
    yield names.step, weights.step
    if weights.norms is not None and weighted:
        yield from zip(names.norms, weights.norms, strict=True)
