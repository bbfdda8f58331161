"""The rows of Gemma 3n and Gemma 4, as those of `family_rows`: layers with heads, caches and inputs that differ."""

from __future__ import annotations

from typing import Any

from helpers import WINDOW

_S, _F = "sliding_attention", "full_attention"
_GEMMA4 = {"sliding_window": WINDOW, "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 0}
_SMALL = {"sliding_window": WINDOW, "head_dim": 16, "hidden_size_per_layer_input": 16,
          "vocab_size_per_layer_input": 97, "num_hidden_layers": 8, "num_kv_shared_layers": 4,
          "layer_types": [_S, _F] * 4}  # fmt: skip
_ROPES = {_F: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
          _S: {"rope_theta": 10000.0, "rope_type": "default"}}  # fmt: skip

# Class of transformers, fields of the small model, config.json of a real model, fields that llama.cpp fixes.
GEMMA_ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "gemma3n": (
        "Gemma3nTextConfig",
        {**_SMALL, "laurel_rank": 8, "final_logit_softcapping": 8.0,
         "activation_sparsity_pattern": [0.9, 0.7, 0.4, *[0.0] * 5],
         "intermediate_size": [96, 96, 64, 96, 96, 96, 64, 96]},
        {"model_type": "gemma3n", "vision_config": {}, "audio_config": {}, "text_config": {
         "model_type": "gemma3n_text", "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": [8192] * 30,
         "num_hidden_layers": 30, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
         "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
         "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0, "rope_scaling": None, "sliding_window": 512,
         "layer_types": ([_S] * 4 + [_F]) * 6, "final_logit_softcapping": 30.0, "laurel_rank": 64,
         "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "altup_num_inputs": 4,
         "altup_active_idx": 0, "altup_coef_clip": 120.0, "altup_correct_scale": True, "num_kv_shared_layers": 10,
         "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "bos_token_id": 2, "eos_token_id": 1}},
        {"num_hidden_layers": 22, "num_kv_shared_layers": 2, "intermediate_size": 2048, "layer_types": None,
         "initializer_range": 0.1, "hidden_size_per_layer_input": 256, "laurel_rank": 64,
         "final_logit_softcapping": 30.0, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {**_GEMMA4, "num_hidden_layers": 6, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
         "final_logit_softcapping": 8.0, "layer_types": [_S, _F, _S, _S, _S, _F]},
        {"model_type": "gemma4", "vision_config": {}, "tie_word_embeddings": True, "text_config": {
         "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "intermediate_size": 21504,
         "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
         "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "rms_norm_eps": 1e-06,
         "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 262144, "sliding_window": 1024,
         "layer_types": ([_S] * 5 + [_F]) * 2, "rope_parameters": _ROPES, "final_logit_softcapping": 30.0,
         "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
         "enable_moe_block": False, "bos_token_id": 2, "eos_token_id": 1}},
        {},
    ),
    "gemma4 unified": (
        "Gemma4UnifiedTextConfig",
        {"sliding_window": WINDOW, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
         "attention_k_eq_v": True, "layer_types": [_S, _F] * 2},
        {"model_type": "gemma4_unified", "vision_config": {}, "text_config": {
         "model_type": "gemma4_unified_text", "vocab_size": 262144, "hidden_size": 3840, "intermediate_size": 15360,
         "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
         "global_head_dim": 512, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "rms_norm_eps": 1e-06,
         "final_logit_softcapping": 30.0, "bos_token_id": 2, "eos_token_id": 1}},
        {},
    ),
    "gemma4 with experts": (
        "Gemma4TextConfig",
        {**_GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "layer_types": [_S, _F] * 2,
         "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32},
        {"model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2816, "intermediate_size": 2112,
         "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
         "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True, "rms_norm_eps": 1e-06,
         "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 262144, "sliding_window": 1024,
         "layer_types": [_S] * 5 + [_F], "rope_parameters": _ROPES, "final_logit_softcapping": 30.0,
         "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "enable_moe_block": True, "num_experts": 128,
         "top_k_experts": 8, "moe_intermediate_size": 704, "bos_token_id": 2, "eos_token_id": 1},
        {},
    ),
    "gemma4 with inputs of layers": (
        "Gemma4TextConfig", {**_SMALL, "global_head_dim": 32, "use_double_wide_mlp": True},
        {"model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 1536, "intermediate_size": 6144,
         "num_hidden_layers": 15, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
         "global_head_dim": 512, "attention_k_eq_v": False, "rms_norm_eps": 1e-06,
         "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "sliding_window": 512,
         "layer_types": ([_S] * 4 + [_F]) * 3, "rope_parameters": _ROPES, "final_logit_softcapping": 30.0,
         "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 10,
         "use_double_wide_mlp": True, "bos_token_id": 2, "eos_token_id": 1},
        {},
    ),
}  # fmt: skip
