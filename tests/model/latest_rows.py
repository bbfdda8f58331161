"""The rows of the families that were added last, as those of `family_rows`: small random models, real descriptions."""

from __future__ import annotations

from typing import Any

from helpers import WINDOW

_LOCAL, _FULL = "sliding_attention", "full_attention"
_LLAMA3 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}  # fmt: skip
_FACTORS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 0.7}

# Class of transformers, fields of the small model, config.json of a real model, fields that llama.cpp fixes.
LATEST_ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "exaone": (
        "LlamaConfig",
        {"head_dim": 24, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
         "rope_parameters": {**_LLAMA3, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}},
        {"model_type": "exaone", "vocab_size": 102400, "hidden_size": 2560, "intermediate_size": 7168,
         "num_layers": 30, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 80,
         "activation_function": "silu", "max_position_embeddings": 32768, "layer_norm_epsilon": 1e-05,
         "rope_theta": 1000000, "rope_scaling": {**_LLAMA3, "factor": 8.0}, "tie_word_embeddings": True,
         "bos_token_id": 1, "eos_token_id": 361},
        {},
    ),
    "jais2": (
        "Jais2Config", {},
        {"model_type": "jais2", "vocab_size": 150272, "hidden_size": 3328, "intermediate_size": 26624,
         "num_hidden_layers": 32, "num_attention_heads": 26, "num_key_value_heads": 26, "head_dim": 128,
         "hidden_act": "relu2", "max_position_embeddings": 8192, "layer_norm_eps": 1e-05, "rope_theta": 500000.0,
         "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "bos_token_id": 0,
         "eos_token_id": 150024},
        {"num_key_value_heads": 4},
    ),
    "solar_open": (
        "SolarOpenConfig",
        {"head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
         "n_shared_experts": 2, "routed_scaling_factor": 1.6},
        {"model_type": "solar_open", "vocab_size": 196608, "hidden_size": 4096, "intermediate_size": 10240,
         "moe_intermediate_size": 1280, "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8,
         "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
         "rope_theta": 1000000, "partial_rotary_factor": 1.0, "n_routed_experts": 128, "n_shared_experts": 1,
         "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
         "first_k_dense_replace": 0, "use_qk_norm": False, "attention_bias": False, "tie_word_embeddings": False,
         "bos_token_id": 1, "eos_token_id": 2},
        {},
    ),
    "vaultgemma": (
        "VaultGemmaConfig", {"head_dim": 24, "sliding_window": WINDOW, "query_pre_attn_scalar": 20},
        {"model_type": "vaultgemma", "vocab_size": 256000, "hidden_size": 1152, "intermediate_size": 6912,
         "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 256,
         "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 1024, "rms_norm_eps": 1e-06,
         "rope_theta": 10000.0, "query_pre_attn_scalar": 256, "sliding_window": 512,
         "layer_types": [_LOCAL, _FULL] * 13, "attn_logit_softcapping": None,
         "final_logit_softcapping": None, "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1},
        None,
    ),
    "flex_olmo": (
        "FlexOlmoConfig", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32},
        {"model_type": "flex_olmo", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 11008,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "rope_theta": 500000, "num_experts": 7,
         "num_experts_per_tok": 5, "norm_topk_prob": False, "attention_bias": False, "tie_word_embeddings": False,
         "eos_token_id": 100257},
        None,
    ),
    "cwm": (
        "CwmConfig", {"head_dim": 24, "sliding_window": WINDOW},
        {"model_type": "cwm", "vocab_size": 128256, "hidden_size": 6144, "intermediate_size": 21504,
         "num_hidden_layers": 64, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
         "rope_scaling": _LLAMA3, "sliding_window": 8192, "layer_types": [_FULL, _LOCAL, _LOCAL, _LOCAL] * 16,
         "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": 128000,
         "eos_token_id": [128001, 128008, 128009]},
        None,
    ),
    "youtu": (
        "YoutuConfig",
        {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
         "v_head_dim": 20, "embedding_initializer_range": 0.2},
        {"model_type": "youtu", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 6144,
         "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu",
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-06, "rope_theta": 1600000, "rope_interleave": True,
         "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
         "attention_bias": False, "tie_word_embeddings": True, "bos_token_id": 128000, "eos_token_id": 128001},
        {},
    ),
    "helium": (
        "HeliumConfig", {"head_dim": 16, "rms_norm_eps": 1e-5},
        {"model_type": "helium", "vocab_size": 64000, "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-08, "rope_theta": 20000.0,
         "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": 1,
         "eos_token_id": 2},
        None,
    ),
    "nanochat": (
        "NanoChatConfig", {},
        {"model_type": "nanochat", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "relu2",
         "max_position_embeddings": 2048, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "attention_bias": False,
         "final_logit_softcapping": 15.0, "tie_word_embeddings": False, "bos_token_id": 65527, "eos_token_id": 65531},
        None,
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        {**_FACTORS, "sliding_window": WINDOW, "layer_rope_theta": [0, 500.0, 500.0, 0]},
        {"model_type": "granite_swa", "vocab_size": 100352, "hidden_size": 2560, "intermediate_size": 8192,
         "num_hidden_layers": 24, "num_attention_heads": 20, "num_key_value_heads": 4, "hidden_act": "silu",
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 128,
         "layer_types": [_FULL, _LOCAL, _LOCAL, _LOCAL] * 6, "layer_rope_theta": [0, 10000, 10000, 10000] * 6,
         "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
         "logits_scaling": 8.0, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
         "bos_token_id": 100257, "eos_token_id": 100257},
        {},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        {**_FACTORS, "sliding_window": WINDOW, "layer_rope_theta": [0, 10000.0, 10000.0, 0], "num_local_experts": 6,
         "num_experts_per_tok": 3, "intermediate_size": 32, "shared_intermediate_size": 48},
        {"model_type": "granitemoe_swa", "vocab_size": 100352, "hidden_size": 1536, "intermediate_size": 512,
         "num_hidden_layers": 32, "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_act": "silu",
         "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 128,
         "layer_types": [_FULL, _LOCAL, _LOCAL, _LOCAL] * 8, "layer_rope_theta": None, "num_local_experts": 64,
         "num_experts_per_tok": 6, "shared_intermediate_size": 1024, "embedding_multiplier": 12.0,
         "residual_multiplier": 0.22, "attention_multiplier": 0.0078125, "logits_scaling": 6.0,
         "attention_bias": False, "tie_word_embeddings": True, "bos_token_id": 100257, "eos_token_id": 100257},
        {},
    ),
    "minicpm": (
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.25, "logits_scaling": 2.0},
        {"model_type": "minicpm", "vocab_size": 122753, "hidden_size": 2304, "intermediate_size": 5760,
         "num_hidden_layers": 40, "num_attention_heads": 36, "num_key_value_heads": 36, "hidden_act": "silu",
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_scaling": None, "scale_emb": 12,
         "scale_depth": 1.4, "dim_model_base": 256, "bos_token_id": 1, "eos_token_id": 2},
        {},
    ),
}  # fmt: skip
SAVED = {"minicpm": {"model_type": "minicpm", "scale_emb": 3.0, "scale_depth": 1.2, "dim_model_base": 32}}  # as above
