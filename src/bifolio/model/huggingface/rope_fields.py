"""Rope in config.json ↔ `RopeConfig`: under old and new names, one or one for each kind of layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from bifolio.config import RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Writing
from bifolio.model.fields import Form
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.window_fields import FULL, LOCAL, layer_kinds

PARAMETERS, SCALING = "rope_parameters", "rope_scaling"
KINDS = ("linear", "llama3", "yarn", "longrope", "su", "proportional")
STILL = 1e30  # divisor of the frequencies of dimensions that are not rotated


# -- reading ----------------------------------------------------------------------------------------------------------
def read_ropes(values: Reading) -> tuple[RopeConfig, ...]:
    """The rope of all layers, or that of layers without and that of layers with a window."""
    own, dim = rope_parameters(values), values["head_dim"]
    if own.get(FULL) is not None:
        return read_rope(values, own.object(FULL), dim), read_rope(values, own.needed_object(LOCAL), dim)
    rope = read_rope(values, own, dim)
    if values.json.get("rope_local_base_freq") is None:
        return (rope,)
    return rope, RopeConfig(values.json.number("rope_local_base_freq"), rope.rotary_dim)


def rope_parameters(values: Reading) -> JsonObject:
    """The parameters of rope; those under the new name come first."""
    return values.json.object(PARAMETERS) or values.json.object(SCALING)


def read_rope(values: Reading, own: JsonObject, head_dim: int) -> RopeConfig:
    """One rope; parameters that `own` leaves out are those of the whole file."""
    whole = values.json
    kind = own.text("rope_type", own.text("type", "default"))
    theta = own.number("rope_theta", 0.0) or whole.number("rope_theta", 0.0) or 10000.0
    share = own.number("partial_rotary_factor", 0.0) or whole.number("partial_rotary_factor", 0.0) or 1.0
    if not 0 < share <= 1:
        owner = own if own.get("partial_rotary_factor") is not None else whole
        raise owner.wrong("partial_rotary_factor", "a number from 0 to 1")
    if theta < 0:
        raise (own if own.get("rope_theta") is not None else whole).wrong("rope_theta", "a positive number")
    if kind == "dynamic" and own.get("alpha") is not None:
        raise UnsupportedModelError(f"{own.path}: rope scaling 'dynamic' with alpha is supported for Hunyuan only")
    if kind in ("default", "none", "dynamic"):  # dynamic scaling is none up to the length of the context
        return RopeConfig(theta, int(head_dim * share))
    if kind not in KINDS:
        supported = ", ".join(KINDS)
        raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; supported: {supported}")
    if kind == "proportional":
        return _proportional(theta, head_dim, share, own.number("factor", 1.0))
    scaling: Any = "longrope" if kind == "su" else kind
    return _scaled(values.json, own, RopeConfig(theta, int(head_dim * share), scaling))


def _proportional(theta: float, dim: int, share: float, factor: float) -> RopeConfig:
    """The frequencies of whole heads, of which the last are not rotated."""
    turned = int(share * dim // 2)
    return RopeConfig(theta, dim, "proportional", frequency_factors=(factor,) * turned + (STILL,) * (dim // 2 - turned))


def _scaled(whole: JsonObject, own: JsonObject, rope: RopeConfig) -> RopeConfig:
    """A rope with the parameters of its scaling."""
    longest, name = whole.count("max_position_embeddings", 2048), "original_max_position_embeddings"
    original = own.count(name, 0, least=0) or whole.count(name, 0, least=0) or longest
    factor = own.number("factor", 0.0) or longest / original
    if factor < 0:
        raise own.wrong("factor", "a positive number")
    return replace(
        rope,
        factor=factor,
        original_max_position=original,
        low_freq_factor=own.number("low_freq_factor", 1.0),
        high_freq_factor=own.number("high_freq_factor", 4.0),
        beta_fast=own.number("beta_fast", 0.0) or 32.0,
        beta_slow=own.number("beta_slow", 0.0) or 1.0,
        truncate=own.flag("truncate", True),
        attention_factor=own.number("attention_factor", _attention_factor(own, rope.scaling, factor, original)),
        frequency_factors=own.numbers("long_factor"),
        frequency_factors_short=own.numbers("short_factor"),
    )


def _attention_factor(own: JsonObject, scaling: str, factor: float, original: int) -> float:
    """The factor of cos and sin of files that do not say it."""
    if factor <= 1 or scaling not in ("yarn", "longrope"):
        return 1.0
    if scaling == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if original > 1 else 1.0
    every, each = own.number("mscale_all_dim", 0.0), own.number("mscale", 0.0)
    growth = 0.1 * math.log(factor)
    return (1 + growth * each) / (1 + growth * every) if each and every else 1 + growth


def ropes_by_kind(values: Reading) -> tuple[int, ...]:
    """The rope of each layer: layers with a window have the second one, if there are two."""
    return tuple(int(kind == LOCAL) for kind in layer_kinds(values)) if len(values["ropes"]) > 1 else ()


# -- writing ----------------------------------------------------------------------------------------------------------
def written_ropes(values: Writing) -> dict[str, Any]:
    """One rope under the old names, which all programs read."""
    if not values.config.ropes:
        return {}
    rope = values.config.ropes[0]
    share = {"partial_rotary_factor": rotated(values)}
    is_told = rope.rotary_dim != values.config.head_dim or values.writes("partial_rotary_factor")
    return {"rope_theta": rope.theta, SCALING: scaling_object(rope), **(share if is_told else {})}


def rotated(values: Writing) -> float:
    """The part of a head that is rotated."""
    return values.config.ropes[0].rotary_dim / values.config.head_dim


def rope_object(rope: RopeConfig) -> dict[str, Any]:
    """A rope under the new names."""
    return {"rope_type": "default", "rope_theta": rope.theta, **(scaling_object(rope) or {})}


def scaling_object(rope: RopeConfig) -> dict[str, Any] | None:
    """The parameters of the scaling of a rope; None: it has none."""
    if rope.scaling == "none":
        return None
    if rope.scaling == "proportional":
        turned = [factor for factor in rope.frequency_factors if factor < STILL / 2]
        share = {"rope_type": rope.scaling, "partial_rotary_factor": 2 * len(turned) / rope.rotary_dim}
        return {**share, "factor": turned[0]} if turned and turned[0] != 1.0 else share
    raw: dict[str, Any] = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "linear":
        return raw
    raw |= {"original_max_position_embeddings": rope.original_max_position}
    if rope.scaling == "llama3":
        return raw | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    raw |= {"attention_factor": rope.attention_factor}
    if rope.scaling == "yarn":
        raw |= {} if rope.truncate else {"truncate": False}
        return raw | {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    return raw | {"long_factor": list(rope.frequency_factors), "short_factor": list(rope.frequency_factors_short)}


NESTED = Form(
    read_ropes,
    lambda v: {PARAMETERS: {**rope_object(v.config.ropes[0]), "partial_rotary_factor": rotated(v)}},
)
BY_KIND = Form(
    read_ropes, lambda v: {PARAMETERS: {FULL: rope_object(v.config.ropes[0]), LOCAL: rope_object(v.config.ropes[-1])}}
)
