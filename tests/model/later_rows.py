"""The rows of families that were added later, as those of `family_rows`: small random models, real descriptions."""

from __future__ import annotations

from typing import Any

from helpers import WINDOW

_LOCAL, _FULL = "sliding_attention", "full_attention"
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_shared_experts": 2}
_GPT = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}

# Class of transformers, fields of the small model, config.json of a real model, fields that llama.cpp fixes.
LATER_ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "minimax_m2": (
        "MiniMaxM2Config",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32, "head_dim": 24, "rotary_dim": 16},
        {"model_type": "minimax_m2", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
         "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 196608, "rms_norm_eps": 1e-06, "rope_theta": 5000000,
         "rotary_dim": 64, "use_qk_norm": True, "qk_norm_type": "per_layer", "num_local_experts": 256,
         "num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_routing_bias": True,
         "shared_intermediate_size": 0, "attn_type_list": [1] * 62, "use_mtp": True, "num_mtp_modules": 3,
         "tie_word_embeddings": False, "bos_token_id": 200034, "eos_token_id": 200020},
        {},
    ),
    "hunyuan_v3": (
        "HYV3Config",
        {**_EXPERTS, "head_dim": 24, "router_scaling_factor": 1.6, "rms_norm_eps": 1e-5},
        {"model_type": "hy_v3", "vocab_size": 120832, "hidden_size": 4096, "intermediate_size": 13312,
         "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "rope_theta": 11158840.0,
         "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
         "router_scaling_factor": 2.826, "first_k_dense_replace": 1, "attention_bias": False, "mlp_bias": False,
         "tie_word_embeddings": False, "bos_token_id": 120000, "eos_token_id": 120025},
        None,
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {**_EXPERTS, "head_dim": 24, "sliding_window": WINDOW, "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 1.6, "first_k_dense_replace": 1},
        {"model_type": "exaone_moe", "vocab_size": 153600, "hidden_size": 6144, "intermediate_size": 18432,
         "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
         "sliding_window": 128, "sliding_window_pattern": "LLLG", "num_experts": 128, "num_experts_per_tok": 8,
         "num_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 1, "n_group": 1,
         "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
         "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 53},
        {},
    ),
    "afmoe": (
        "AfmoeConfig",
        {**_EXPERTS, "head_dim": 24, "sliding_window": WINDOW, "mup_enabled": True, "route_scale": 1.6,
         "num_dense_layers": 1},
        {"model_type": "afmoe", "vocab_size": 200192, "hidden_size": 2048, "intermediate_size": 6144,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 10000,
         "sliding_window": 2048, "global_attn_every_n_layers": 4, "mup_enabled": True, "num_dense_layers": 2,
         "num_experts": 128, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1024,
         "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "n_group": 1, "topk_group": 1,
         "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 3},
        {},
    ),
    "kimi_k2": (
        "DeepseekV3Config",
        {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
         "v_head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
         "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
         "routed_scaling_factor": 2.5,
         "rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "beta_fast": 1.0, "beta_slow": 1.0,
                          "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 32}},
        {"model_type": "kimi_k2", "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432,
         "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64, "hidden_act": "silu",
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-06, "rope_theta": 50000.0, "kv_lora_rank": 512,
         "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
         "n_routed_experts": 384, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
         "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
         "routed_scaling_factor": 2.827, "first_k_dense_replace": 1, "moe_layer_freq": 1, "attention_bias": False,
         "rope_scaling": {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0,
                          "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
         "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "bos_token_id": 163584, "eos_token_id": 163585},
        {},
    ),
    "gptj": (
        "GPTJConfig", {**_GPT, "rotary_dim": 8},
        {"model_type": "gptj", "vocab_size": 50400, "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048,
         "n_inner": None, "rotary_dim": 64, "rotary": True, "activation_function": "gelu_new",
         "layer_norm_epsilon": 1e-05, "tie_word_embeddings": False, "bos_token_id": 50256, "eos_token_id": 50256},
        None,
    ),
    "gpt_bigcode": (
        "GPTBigCodeConfig", _GPT,
        {"model_type": "gpt_bigcode", "vocab_size": 49152, "n_embd": 2048, "n_layer": 24, "n_head": 16,
         "n_positions": 8192, "n_inner": 8192, "activation_function": "gelu_pytorch_tanh", "multi_query": True,
         "attention_softmax_in_fp32": True, "scale_attn_weights": True, "layer_norm_epsilon": 1e-05,
         "bos_token_id": 0, "eos_token_id": 0},
        {},
    ),
    "gpt_bigcode by head": (
        "GPTBigCodeConfig", {**_GPT, "multi_query": False},
        {"model_type": "gpt_bigcode", "vocab_size": 49280, "n_embd": 512, "n_layer": 4, "n_head": 8,
         "n_positions": 2048, "n_inner": None, "activation_function": "gelu_pytorch_tanh", "multi_query": False,
         "bos_token_id": 49152, "eos_token_id": 49152},
        {},
    ),
}  # fmt: skip
