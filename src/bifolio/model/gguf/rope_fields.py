"""Rope in the metadata and the tensors of GGUF files ↔ `RopeConfig`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Writing
from bifolio.model.fields import Form
from bifolio.model.gguf.header import Header
from bifolio.model.weights import inverse_frequencies
from bifolio.model.window_fields import plain_in_windows
from bifolio.quant.tensor import QuantizedTensor


def read_rope(values: Reading, head_dim: int | None = None) -> RopeConfig:
    """The rope of all layers, or of those without a window."""
    header = values.header
    kind = header.text(".rope.scaling.type", "linear")
    factor = header.number(".rope.scaling.factor", header.number(".rope.scale_linear", 0.0)) or 1.0
    dim = header.count(".rope.dimension_count", values["head_dim"] if head_dim is None else head_dim)
    attention_factor = header.number(".rope.scaling.attn_factor", 1.0)
    if factor <= 0:
        raise header.wrong(".rope.scaling.factor", "a positive number")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModelError(f"{header.path}: rope scaling {kind!r} is not supported")
    common: dict[str, Any] = {"theta": header.number(".rope.freq_base", 10000.0), "rotary_dim": dim}
    context = header.count(".context_length")
    original = header.count(".rope.scaling.original_context_length", context)
    if long := _factors(header, "rope_factors_long.weight", dim):
        return RopeConfig(
            **common,
            scaling="longrope",
            factor=context / max(original, 1),
            original_max_position=original,
            attention_factor=attention_factor,
            frequency_factors=long,
            frequency_factors_short=_factors(header, "rope_factors_short.weight", dim),
        )
    common["frequency_factors"] = _factors(header, "rope_freqs.weight", dim)
    if kind == "yarn":
        return RopeConfig(
            **common,
            scaling="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=header.number(".rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=header.number(".rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=attention_factor * yarn_attention_factor(factor),
        )
    linear = kind == "linear" and factor != 1.0
    return RopeConfig(**common, scaling="linear" if linear else "none", factor=factor if linear else 1.0)


def local_rope(values: Reading, dim: int) -> RopeConfig:
    """The rope of layers with a window."""
    return RopeConfig(values.header.number(".rope.freq_base_swa", 10000.0), dim)


def yarn_attention_factor(factor: float) -> float:
    """Yarn's default factor on cos and sin; GGUF stores the ratio to it."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factors(header: Header, name: str, rotary_dim: int) -> tuple[float, ...]:
    """Frequency divisors, if the file has a tensor of them."""
    if not header.has_tensor(name):
        return ()
    values = header.file.tensor(name).dequantize().reshape(-1)
    if len(values) != rotary_dim // 2 or not (np.isfinite(values) & (values > 0)).all():
        raise header.fail(f"{name!r} must hold {rotary_dim // 2} positive numbers")
    return tuple(float(value) for value in values)


def rope_entries(values: Writing) -> dict[str, Any]:
    if not values.config.ropes:
        return {}
    rope = values.config.ropes[0]
    entries: dict[str, Any] = {"rope.dimension_count": rope.rotary_dim, "rope.freq_base": rope.theta}
    if len(values.config.ropes) > 1:
        entries["rope.freq_base_swa"] = values.config.ropes[1].theta
    if rope.scaling in ("linear", "yarn"):
        entries |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": rope.factor}
    if rope.scaling in ("yarn", "longrope"):
        entries["rope.scaling.original_context_length"] = rope.original_max_position
    if rope.scaling == "yarn":
        entries["rope.scaling.attn_factor"] = rope.attention_factor / yarn_attention_factor(rope.factor)
        entries["rope.scaling.yarn_beta_fast"] = rope.beta_fast
        entries["rope.scaling.yarn_beta_slow"] = rope.beta_slow
    if rope.scaling == "longrope":
        entries["rope.scaling.attn_factor"] = rope.attention_factor
    return entries


PLAIN_IN_WINDOWS = Form(lambda v: plain_in_windows(v, read_rope(v)), rope_entries)


def rope_tensors(config: ModelConfig) -> dict[str, QuantizedTensor]:
    """Frequency divisors, which GGUF stores as tensors."""
    if not config.ropes:
        return {}
    rope = config.ropes[0]
    if rope.scaling == "longrope":
        factors = {"rope_factors_long.weight": rope.frequency_factors}
        factors["rope_factors_short.weight"] = rope.frequency_factors_short or rope.frequency_factors
    elif rope.scaling == "llama3":
        plain = inverse_frequencies(RopeConfig(rope.theta, rope.rotary_dim))[0]
        factors = {"rope_freqs.weight": tuple((plain / inverse_frequencies(rope)[0]).tolist())}
    else:
        factors = {"rope_freqs.weight": rope.frequency_factors} if rope.frequency_factors else {}
    return {name: QuantizedTensor.from_array(np.array(values, np.float32)) for name, values in factors.items()}
