"""The rows of families with new kinds of layers, as those of `family_rows`: small random models, real descriptions."""

from __future__ import annotations

from typing import Any

from helpers import WINDOW

_LINEAR, _FULL, _LOCAL = "linear_attention", "full_attention", "sliding_attention"
_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}

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
    "bailing_hybrid": (
        "BailingHybridConfig",
        {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24,
         "head_dim": 12, "rms_norm_eps": 1e-3, "num_local_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 32, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 1.6, "first_k_dense_replace": 1, "kda_lower_bound": -3.0, "num_mtp_layers": 0,
         "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR]},
        {"model_type": "bailing_hybrid", "vocab_size": 157184, "hidden_size": 1536, "intermediate_size": 4608,
         "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-06, "rope_theta": 6000000,
         "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 6000000, "rope_type": "default"},
         "rope_interleave": True, "layer_group_size": 4, "kda_safe_gate": True, "kda_lower_bound": -5,
         "no_kda_lora": True, "short_conv_kernel_size": 4, "gated_attention_proj_granularity_type": "head_wise",
         "kv_lora_rank": 512, "q_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
         "first_k_dense_replace": 1, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
         "moe_shared_expert_intermediate_size": 512, "num_shared_experts": 1, "n_group": 8, "topk_group": 4,
         "norm_topk_prob": True, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
         "moe_router_enable_expert_bias": True, "num_nextn_predict_layers": 0, "use_bias": False,
         "use_qk_norm": True, "expert_swiglu_limit_list": None, "tie_word_embeddings": False,
         "eos_token_id": 156895},
        {},
    ),
    "mistral4": (
        "Mistral4Config",
        {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
         "v_head_dim": 24, "rms_norm_eps": 1e-3, "n_routed_experts": 8, "num_experts_per_tok": 3,
         "moe_intermediate_size": 32, "n_shared_experts": 2, "n_group": 2, "topk_group": 1,
         "routed_scaling_factor": 1.6, "first_k_dense_replace": 1,
         "rope_parameters": {**_YARN, "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 6,
                             "llama_4_scaling_beta": 0.5}},
        {"model_type": "mistral4", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 12288,
         "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 1048576, "rms_norm_eps": 1e-06, "kv_lora_rank": 256,
         "q_lora_rank": 1024, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 128,
         "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 2048,
         "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
         "first_k_dense_replace": 0, "rope_interleave": True, "attention_bias": False, "tie_word_embeddings": False,
         "rope_parameters": {**_YARN, "rope_theta": 10000.0, "factor": 128.0, "partial_rotary_factor": 0.5,
                             "original_max_position_embeddings": 8192, "llama_4_scaling_beta": 0.1},
         "bos_token_id": 1, "eos_token_id": 2},
        {"n_group": 1, "topk_group": 1},
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        {"sliding_window": WINDOW, "logit_scale": 0.75, "head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3,
         "intermediate_size": 32, "prefix_dense_intermediate_size": 80, "num_shared_experts": 2,
         "expert_selection_fn": "sigmoid", "num_hidden_layers": 5, "tie_word_embeddings": True,
         "layer_types": [_FULL, _LOCAL, _LOCAL, _FULL, _LOCAL],
         "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse"]},
        {"model_type": "cohere2_moe", "vocab_size": 262144, "hidden_size": 2048, "intermediate_size": 768,
         "prefix_dense_intermediate_size": 3072, "num_hidden_layers": 49, "num_attention_heads": 32,
         "num_key_value_heads": 4, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 500000,
         "rms_norm_eps": 1e-06, "layer_norm_eps": 1e-05, "logit_scale": 1.0, "rope_theta": 50000,
         "sliding_window": 4096, "first_k_dense_replace": 1, "prefix_dense_sliding_window_pattern": 1,
         "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 0, "expert_selection_fn": "sigmoid",
         "norm_topk_prob": False, "use_parallel_block": True, "use_qk_norm": False, "attention_bias": False,
         "tie_word_embeddings": None, "bos_token_id": 2, "eos_token_id": 6},
        {},
    ),
}  # fmt: skip
