"""The rows of families with new kinds of layers, as those of `family_rows`: small random models, real descriptions."""

from __future__ import annotations

from typing import Any

_LINEAR, _FULL = "linear_attention", "full_attention"

# Class of transformers, fields of the small model, config.json of a real model, fields that llama.cpp fixes.
NEWEST_ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 24,
         "rope_parameters": {"rope_type": "default", "rope_theta": None}, "rms_norm_eps": 1e-3,
         "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR]},
        {"model_type": "olmo_hybrid", "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008,
         "num_hidden_layers": 32, "num_attention_heads": 30, "num_key_value_heads": 30, "hidden_act": "silu",
         "max_position_embeddings": 65536, "rms_norm_eps": 1e-06, "attention_bias": False,
         "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL] * 8, "linear_num_key_heads": 30,
         "linear_num_value_heads": 30, "linear_key_head_dim": 96, "linear_value_head_dim": 192,
         "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True,
         "rope_parameters": {"rope_theta": None, "rope_type": "default"}, "tie_word_embeddings": False,
         "bos_token_id": None, "eos_token_id": 100257},
        None,
    ),
}  # fmt: skip
