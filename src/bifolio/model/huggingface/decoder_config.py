"""`config.json` of a decoder ↔ `ModelConfig`: the fields that most families share.

A family (`model/families/`) calls `decoder_from_hf` and `decoder_to_hf` and adds the fields in which it differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import ModelFileError, UnsupportedModelError

Raw = Mapping[str, Any]
Activation = Literal["silu", "gelu_tanh", "gelu", "relu2", "swiglu_clamped"]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "relu2",
}


# -- reading ----------------------------------------------------------------------------------------------------------
def decoder_from_hf(raw: Raw, architecture: str, *, activation: Any = None, **overrides: Any) -> ModelConfig:
    """A decoder with RMS norms, rope and a gated MLP; `overrides` are fields of `ModelConfig` that a family sets."""
    heads = int(raw["num_attention_heads"])
    num_layers = int(raw["num_hidden_layers"])
    head_dim = int(raw.get("head_dim") or int(raw["hidden_size"]) // heads)
    bias = bool(raw.get("attention_bias", False))
    ropes, layer_rope = _ropes(raw, head_dim)
    window = raw.get("sliding_window")
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": int(raw["vocab_size"]),
        "hidden_size": int(raw["hidden_size"]),
        "num_layers": num_layers,
        "num_heads": heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "intermediate_size": int(raw["intermediate_size"]),
        "max_position": int(raw.get("max_position_embeddings", 2048)),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "activation": activation or read_activation(raw.get("hidden_act", "silu")),
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bool(raw.get("mlp_bias", False)),
        "tie_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "ropes": ropes,
        "layer_rope": layer_rope,
        "layer_window": (int(window),) * num_layers if window else (),
        "attention_softcap": float(raw.get("attn_logit_softcapping") or 0.0),
        "logit_softcap": float(raw.get("final_logit_softcapping") or 0.0),
        "bos_token_id": optional_int(raw.get("bos_token_id")),
        "eos_token_ids": token_ids(raw.get("eos_token_id")),
    }
    return ModelConfig(**{**fields, **overrides})


def expert_count(raw: Raw) -> int:
    """The number of experts, under any of the names that it has."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = [int(raw[name]) for name in names if raw.get(name) is not None]
    if not found:
        raise KeyError("num_experts")
    return found[0]


def layer_types(raw: Raw, period: int = 6) -> list[str]:
    """'sliding_attention' or 'full_attention' for every layer; every `period`-th is full unless the file says more."""
    types = raw.get("layer_types")
    if types is not None:
        return [str(kind) for kind in types]
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or period
    layers = range(int(raw["num_hidden_layers"]))
    return ["full_attention" if (i + 1) % int(pattern) == 0 else "sliding_attention" for i in layers]


def kinds_of_layers(raw: Raw, kinds: Sequence[Any]) -> list[str]:
    """The kind of each layer of a hybrid model; an error if there are more or fewer than layers."""
    count = int(raw["num_hidden_layers"])
    if len(kinds) != count:
        raise ModelFileError(f"config.json names the kinds of {len(kinds)} layers, but has {count}")
    return [str(kind) for kind in kinds]


def windows_by_type(raw: Raw, period: int = 6) -> tuple[int | None, ...]:
    """The window of every layer, where the layers differ by type."""
    window = raw.get("sliding_window")
    if not window:
        return ()
    return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types(raw, period))


def _ropes(raw: Raw, head_dim: int) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """Rope configurations and the index for each layer; reads the old and the new field names."""
    parameters = raw.get("rope_parameters")
    if isinstance(parameters, Mapping) and "full_attention" in parameters:
        full = read_rope(raw, dict(parameters["full_attention"]), head_dim)
        local = read_rope(raw, dict(parameters["sliding_attention"]), head_dim)
    elif "rope_local_base_freq" in raw:
        full = read_rope(raw, dict(raw.get("rope_scaling") or {}), head_dim)
        local = read_rope(raw, {"rope_theta": raw["rope_local_base_freq"]}, head_dim)
    else:
        return (read_rope(raw, dict(parameters or raw.get("rope_scaling") or {}), head_dim),), ()
    kinds = layer_types(raw)
    return (full, local), tuple(int(kind == "sliding_attention") for kind in kinds)


def read_rope(raw: Raw, parameters: dict[str, Any], head_dim: int) -> RopeConfig:
    """One rope configuration; `parameters` override those of the whole file."""
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    partial: Any = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    theta: Any = parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0
    rotary_dim = int(head_dim * float(partial))
    max_position = int(raw.get("max_position_embeddings", 2048))
    if kind in ("default", "none"):
        return RopeConfig(float(theta), rotary_dim)
    if kind not in ("linear", "llama3", "yarn", "longrope", "su"):
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not supported; supported: linear, llama3, yarn, longrope"
        )
    original = int(
        parameters.get("original_max_position_embeddings")
        or raw.get("original_max_position_embeddings")
        or max_position
    )
    factor = float(parameters.get("factor") or max_position / original)
    attention = parameters.get("attention_factor")
    if kind == "yarn" and attention is None:
        attention = _yarn_attention_factor(parameters, factor)
    if kind in ("longrope", "su") and attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeConfig(
        theta=float(theta),
        rotary_dim=rotary_dim,
        scaling=cast(Any, "longrope" if kind == "su" else kind),
        factor=factor,
        original_max_position=original,
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=float(attention if attention is not None else 1.0),
        frequency_factors=tuple(float(f) for f in parameters.get("long_factor", ())),
        frequency_factors_short=tuple(float(f) for f in parameters.get("short_factor", ())),
    )


def _yarn_attention_factor(parameters: Raw, factor: float) -> float:
    def mscale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return mscale(float(parameters["mscale"])) / mscale(float(parameters["mscale_all_dim"]))
    return mscale(1.0)


def read_activation(name: Any) -> Activation:
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"the activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)


# -- writing ----------------------------------------------------------------------------------------------------------
def decoder_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The fields that `decoder_from_hf` reads, without biases and windows, which the family adds."""
    rope = config.ropes[0] if config.ropes else None
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": write_activation(config, "silu"),
        **({} if rope is None else {"rope_theta": rope.theta, "rope_scaling": rope_scaling(rope)}),
    }


def nested_rope(config: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of `decoder_to_hf` with all values of rope in one table, the rotated part of a head among them."""
    scaling, theta = fields["rope_scaling"] or {"rope_type": "default"}, fields["rope_theta"]
    partial = config.ropes[0].rotary_dim / config.head_dim
    others = {name: value for name, value in fields.items() if name not in ("rope_scaling", "rope_theta")}
    return {**others, "rope_parameters": {**scaling, "rope_theta": theta, "partial_rotary_factor": partial}}


def largest_window(config: ModelConfig) -> int | None:
    return max((window for window in config.layer_window if window is not None), default=None)


def written_layer_types(config: ModelConfig) -> list[str]:
    return ["full_attention" if config.window(i) is None else "sliding_attention" for i in range(config.num_layers)]


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
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


def write_activation(config: ModelConfig, preferred: str) -> str:
    """The name of the activation in the family's config.json."""
    if ACTIVATIONS[preferred] == config.activation:
        return preferred
    for spelling, ours in ACTIVATIONS.items():
        if ours == config.activation:
            return spelling
    raise UnsupportedModelError(f"the activation {config.activation!r} has no name in a Hugging Face config.json")
