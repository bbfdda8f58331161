"""`ModelConfig` → the metadata of a GGUF file, the reverse of `config_from_gguf`."""

from __future__ import annotations

import math

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families import family_of
from bifolio.model.gguf.decoder_config import yarn_attention_factor
from bifolio.model.gguf.reader import Value
from bifolio.model.weights import inverse_frequencies
from bifolio.quant.tensor import QuantizedTensor

_QUANTIZATION_VERSION = 2


def gguf_architecture(config: ModelConfig) -> str:
    """The name of the architecture in GGUF files; UnsupportedModelError if GGUF cannot describe the network."""
    family = family_of(config)
    name = family.written_with_experts if config.moe is not None and family.written_with_experts else family.written_as
    if name is None:
        raise UnsupportedModelError(f"GGUF files of the architecture {config.architecture!r} cannot be written")
    if config.activation != family.gguf_activation:
        raise UnsupportedModelError(f"GGUF cannot describe a {name} model with the activation {config.activation!r}")
    return name


def model_metadata(config: ModelConfig, file_type: int, name: str) -> dict[str, Value]:
    """All entries about the network, without those of the tokenizer."""
    architecture = gguf_architecture(config)
    norm_key = "layer_norm_epsilon" if config.norm == "layer" else "layer_norm_rms_epsilon"
    entries: dict[str, Value] = {
        "general.name": name,
        "general.type": "model",
        "general.file_type": file_type,
        "general.quantization_version": _QUANTIZATION_VERSION,
    }
    own: dict[str, Value] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        f"attention.{norm_key}": config.norm_eps,
    }
    if config.logit_softcap:
        own["final_logit_softcapping"] = config.logit_softcap
    if config.attention_softcap:
        own["attn_logit_softcapping"] = config.attention_softcap
    own |= _attention_scale(config) | _window_entries(config) | _rope_entries(config) | _expert_entries(config)
    own |= family_of(config).gguf_entries(config)
    return entries | {f"{architecture}.{key}": value for key, value in own.items()}


def _expert_entries(config: ModelConfig) -> dict[str, Value]:
    moe = config.moe
    if moe is None:
        return {}
    first = len(moe.dense_layers)
    if moe.dense_layers != tuple(range(first)):
        raise UnsupportedModelError(
            f"GGUF cannot describe plain MLPs in the layers {moe.dense_layers}, only in the first"
        )
    entries: dict[str, Value] = {
        "expert_count": moe.num_experts,
        "expert_used_count": moe.top_k,
        "expert_feed_forward_length": moe.expert_size,
        "expert_weights_scale": moe.scale,
        "expert_weights_norm": moe.renormalise,
        "expert_gating_func": 1 if moe.scoring == "softmax" else 2,
    }
    if first:
        entries["leading_dense_block_count"] = first
    if moe.shared_size:
        entries["expert_shared_feed_forward_length"] = moe.shared_size
        entries["expert_shared_count"] = max(1, moe.shared_size // moe.expert_size)
    if moe.num_groups > 1:
        entries |= {"expert_group_count": moe.num_groups, "expert_group_used_count": moe.top_groups}
    return entries


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


def _attention_scale(config: ModelConfig) -> dict[str, Value]:
    """The attention scale, if it differs from the default of the architecture."""
    implied = family_of(config).gguf_scale(config)
    return {} if math.isclose(config.scale, implied, rel_tol=1e-6) else {"attention.scale": config.scale}


def _window_entries(config: ModelConfig) -> dict[str, Value]:
    windows = {window for window in config.layer_window if window is not None}
    if not windows:
        return {}
    if len(windows) > 1:
        raise UnsupportedModelError(f"GGUF cannot describe layers with different window sizes: {sorted(windows)}")
    entries: dict[str, Value] = {"attention.sliding_window": windows.pop()}
    has_window = [window is not None for window in config.layer_window]
    period = family_of(config).gguf_window_period
    if has_window != [not period or (layer + 1) % period != 0 for layer in range(config.num_layers)]:
        entries["attention.sliding_window_pattern"] = np.array(has_window)
    return entries


def _rope_entries(config: ModelConfig) -> dict[str, Value]:
    if not config.ropes:
        return {}
    rope = config.ropes[0]
    entries: dict[str, Value] = {"rope.dimension_count": rope.rotary_dim, "rope.freq_base": rope.theta}
    if len(config.ropes) > 1:
        entries["rope.freq_base_swa"] = config.ropes[1].theta
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
