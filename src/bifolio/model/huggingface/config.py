"""`config.json` of a Hugging Face folder → `ModelConfig`. Families differ in data, not in code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, cast

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import ConfigError, ModelFileError, UnsupportedModelError

Raw = Mapping[str, Any]
Activation = Literal["silu", "gelu_tanh", "gelu"]

MODEL_TYPES = {  # model_type in config.json → our architecture
    "gpt2": "gpt2",
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "phi3": "phi3",
}
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def config_from_hf(raw: Raw) -> ModelConfig:
    """Read the fields; what is missing or of the wrong kind is a named error."""
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"the architecture {model_type!r} is not supported; supported are: {', '.join(sorted(MODEL_TYPES))}"
        )
    if model_type == "gemma3" and isinstance(raw.get("text_config"), Mapping):
        raw = {**raw["text_config"], "model_type": "gemma3_text"}
    try:
        return _gpt2(raw) if model_type == "gpt2" else _llama_like(raw, MODEL_TYPES[model_type])
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if isinstance(error, ConfigError | ModelFileError):
            raise
        raise ModelFileError(f"config.json is not usable: {type(error).__name__}: {error}") from error


def _gpt2(raw: Raw) -> ModelConfig:
    d, heads = int(raw["n_embd"]), int(raw["n_head"])
    if raw.get("scale_attn_by_inverse_layer_idx") or raw.get("reorder_and_upcast_attn"):
        raise UnsupportedModelError("GPT-2 with attention scaled by layer index is not supported")
    return ModelConfig(
        architecture="gpt2",
        vocab_size=int(raw["vocab_size"]),
        hidden_size=d,
        num_layers=int(raw["n_layer"]),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=d // heads,
        intermediate_size=int(raw.get("n_inner") or 4 * d),
        max_position=int(raw["n_positions"]),
        norm="layer",
        norm_eps=float(raw.get("layer_norm_epsilon", 1e-5)),
        activation=_activation(raw.get("activation_function", "gelu_new")),
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_embeddings=bool(raw.get("tie_word_embeddings", True)),
        learned_positions=True,
        bos_token_id=_optional_int(raw.get("bos_token_id")),
        eos_token_ids=_ids(raw.get("eos_token_id")),
    )


def _llama_like(raw: Raw, architecture: str) -> ModelConfig:
    heads = int(raw["num_attention_heads"])
    num_layers = int(raw["num_hidden_layers"])
    head_dim = int(raw.get("head_dim") or int(raw["hidden_size"]) // heads)
    gemma = architecture == "gemma3"
    bias = bool(raw.get("attention_bias", False))
    ropes, layer_rope = _ropes(raw, head_dim, num_layers)
    scalar = raw.get("query_pre_attn_scalar")
    if raw.get("attn_logit_softcapping"):
        raise UnsupportedModelError("soft-capped attention scores (Gemma 2) are not supported")
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate_size=int(raw["intermediate_size"]),
        max_position=int(raw.get("max_position_embeddings", 2048)),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        norm_offset=1.0 if gemma else 0.0,
        activation=_activation(raw.get("hidden_activation") if gemma else raw.get("hidden_act", "silu")),
        qkv_bias=True if architecture == "qwen2" else bias,
        output_bias=False if architecture == "qwen2" else bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture in ("qwen3", "gemma3"),
        post_norms=gemma,
        tie_embeddings=bool(raw.get("tie_word_embeddings", gemma)),
        ropes=ropes,
        layer_rope=layer_rope,
        layer_window=_windows(raw, architecture, num_layers),
        embedding_scale=math.sqrt(int(raw["hidden_size"])) if gemma else 1.0,
        attention_scale=float(scalar) ** -0.5 if gemma and scalar else 0.0,
        logit_softcap=float(raw.get("final_logit_softcapping") or 0.0),
        bos_token_id=_optional_int(raw.get("bos_token_id")),
        eos_token_ids=_ids(raw.get("eos_token_id")),
    )


def _layer_types(raw: Raw, num_layers: int) -> list[str]:
    """'sliding_attention' or 'full_attention' for every layer."""
    types = raw.get("layer_types")
    if types is not None:
        return [str(kind) for kind in types]
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    return ["full_attention" if (i + 1) % int(pattern) == 0 else "sliding_attention" for i in range(num_layers)]


def _windows(raw: Raw, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if not window:
        return ()
    if architecture in ("qwen2", "qwen3"):
        if not raw.get("use_sliding_window", False):
            return ()
        if raw.get("layer_types") is None:
            first = int(raw.get("max_window_layers", num_layers))
            return tuple(int(window) if i >= first else None for i in range(num_layers))
    if architecture in ("gemma3", "qwen2", "qwen3"):
        kinds = _layer_types(raw, num_layers)
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    return (int(window),) * num_layers


def _ropes(raw: Raw, head_dim: int, num_layers: int) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """Rope configurations and which of them each layer uses; reads the old and the new spelling."""
    parameters = raw.get("rope_parameters")
    if isinstance(parameters, Mapping) and "full_attention" in parameters:
        full = _rope(raw, dict(parameters["full_attention"]), head_dim)
        local = _rope(raw, dict(parameters["sliding_attention"]), head_dim)
    elif "rope_local_base_freq" in raw:
        full = _rope(raw, dict(raw.get("rope_scaling") or {}), head_dim)
        local = _rope(raw, {"rope_theta": raw["rope_local_base_freq"]}, head_dim)
    else:
        return (_rope(raw, dict(parameters or raw.get("rope_scaling") or {}), head_dim),), ()
    kinds = _layer_types(raw, num_layers)
    return (full, local), tuple(int(kind == "sliding_attention") for kind in kinds)


def _rope(raw: Raw, parameters: dict[str, Any], head_dim: int) -> RopeConfig:
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


def _activation(name: Any) -> Activation:
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(f"the activation {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, list | tuple) else (int(value),)
