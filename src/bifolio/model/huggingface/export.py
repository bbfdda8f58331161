"""`ModelConfig` → `config.json` of a Hugging Face folder: the inverse of `hf_config.py`."""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.huggingface.config import ACTIVATIONS, MODEL_TYPES

Raw = dict[str, Any]
_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}


def config_to_hf(config: ModelConfig, dtype: str = "float32") -> Raw:
    """A `config.json` that transformers and `config_from_hf` both read back to the same network."""
    model_type = next(name for name, ours in MODEL_TYPES.items() if ours == config.architecture)
    fields = _gpt2(config) if config.architecture == "gpt2" else _llama_like(config)
    eos = list(config.eos_token_ids)
    return {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        **fields,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": dtype,
    }


def _gpt2(config: ModelConfig) -> Raw:
    return {
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_position,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": _activation(config, "gelu_new"),
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _llama_like(config: ModelConfig) -> Raw:
    raw: Raw = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": _activation(config, "silu"),
        **_windows(config),
    }
    if config.architecture in ("llama", "qwen3"):
        raw |= {"attention_bias": config.qkv_bias}
    if config.architecture == "llama":
        raw |= {"mlp_bias": config.mlp_bias}
    if config.architecture == "phi3":
        raw |= {"pad_token_id": None, "partial_rotary_factor": config.ropes[0].rotary_dim / config.head_dim}
    if config.architecture == "gemma3":
        raw |= {
            "hidden_activation": _activation(config, "gelu_pytorch_tanh"),
            "query_pre_attn_scalar": _whole(config.scale**-2),
            "final_logit_softcapping": config.logit_softcap or None,
            "rope_theta": config.ropes[0].theta,
            "rope_local_base_freq": config.ropes[-1].theta,
            "rope_scaling": _rope_scaling(config.ropes[0]),
        }
        return raw
    return raw | {"rope_theta": config.ropes[0].theta, "rope_scaling": _rope_scaling(config.ropes[0])}


def _windows(config: ModelConfig) -> Raw:
    windows = set(config.layer_window) - {None}
    kinds = ["full_attention" if config.window(i) is None else "sliding_attention" for i in range(config.num_layers)]
    window = max(windows, default=None, key=lambda size: size or 0)
    if config.architecture == "gemma3":
        return {"sliding_window": window, "layer_types": kinds}
    if config.architecture in ("qwen2", "qwen3") and windows:
        return {"use_sliding_window": True, "sliding_window": window, "layer_types": kinds}
    if config.architecture in ("mistral", "phi3"):
        return {"sliding_window": window}
    return {}


def _rope_scaling(rope: RopeConfig) -> Raw | None:
    if rope.scaling == "none":
        return None
    raw: Raw = {"rope_type": rope.scaling, "factor": rope.factor}
    if rope.scaling == "linear":
        return raw
    raw |= {"original_max_position_embeddings": rope.original_max_position}
    if rope.scaling == "llama3":
        return raw | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    raw |= {"attention_factor": rope.attention_factor}
    if rope.scaling == "yarn":
        return raw | {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    return raw | {"long_factor": list(rope.frequency_factors), "short_factor": list(rope.frequency_factors_short)}


def _activation(config: ModelConfig, preferred: str) -> str:
    """The family's own spelling of the activation where it has one."""
    if ACTIVATIONS[preferred] == config.activation:
        return preferred
    for spelling, ours in ACTIVATIONS.items():
        if ours == config.activation:
            return spelling
    raise UnsupportedModelError(f"the activation {config.activation!r} has no name in a Hugging Face config.json")


def _whole(value: float) -> int | float:
    """The whole number that a single-precision file rounded, where it is one: transformers insists on it."""
    return round(value) if abs(value - round(value)) < 1e-5 * value else value
