"""Norms from the tensors of a file."""

from __future__ import annotations

import numpy as np

from bifolio.config import ModelConfig
from bifolio.kernels.interface import Norm
from bifolio.model.fetch import FetchVector


def stored_norm(config: ModelConfig, name: str, size: int, vector: FetchVector, rms: bool = False) -> Norm:
    """The norm of this name; `rms`: also in a network with layer norms."""
    centered = config.norm == "layer" and not rms
    weight = vector(name + ".weight", (size,)) if config.norm_weight else np.ones(size, np.float32)
    if config.norm_offset:
        weight = weight + config.norm_offset  # a Python float keeps the dtype of the array
    bias = vector(name + ".bias", (size,)) if centered and config.norm_bias else None
    return Norm(weight, bias, config.norm_eps, centered)
