"""The rows of families with experts, as those of `family_rows`."""

from __future__ import annotations

from typing import Any

from helpers import WINDOW

_GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2,
            "logits_scaling": 0.7}  # fmt: skip
_GRANITE_3B = {
    "model_type": "granitemoe", "vocab_size": 49155, "hidden_size": 1536, "intermediate_size": 512,
    "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rope_scaling": None,
    "num_local_experts": 40, "num_experts_per_tok": 8, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
    "attention_multiplier": 0.015625, "logits_scaling": 6.0, "attention_bias": False, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

# Class of transformers, fields of the small model, config.json of a real model, fields that llama.cpp fixes.
EXPERT_ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "dots1": (
        "Dots1Config",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
         "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.6, "n_group": 4,
         "topk_group": 2, "sliding_window": WINDOW, "max_window_layers": 2},
        {"model_type": "dots1", "vocab_size": 152064, "hidden_size": 4096, "intermediate_size": 10944,
         "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
         "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 10000000, "attention_bias": False,
         "sliding_window": None, "use_sliding_window": False, "max_window_layers": 62, "n_routed_experts": 128,
         "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1,
         "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc",
         "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 151645},
        {"sliding_window": None, "num_key_value_heads": 4},
    ),
    "ernie4_5moe": (
        "Ernie4_5_MoeConfig",
        {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2},
        {"model_type": "ernie4_5_moe", "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288,
         "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4, "hidden_act": "silu",
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000, "use_bias": False,
         "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
         "moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_use_aux_free": True,
         "num_nextn_predict_layers": 1, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
        {},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "attention_bias": True},
        _GRANITE_3B, {},
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 48},
        {**_GRANITE_3B, "model_type": "granitemoeshared", "shared_intermediate_size": 1024}, {},
    ),
    "hunyuan_moe": (
        "HunYuanMoEV1Config",
        {"head_dim": 24, "num_experts": 6, "moe_topk": 3,
         "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 10000.0, "factor": 1.0}},
        {"model_type": "hunyuan_v1_moe", "vocab_size": 128167, "hidden_size": 4096, "intermediate_size": 3072,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
         "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                          "mscale_all_dim": 1.0, "type": "dynamic"},
         "moe_intermediate_size": [3072] * 32, "moe_layer_num_skipped": 0, "moe_topk": [8] * 32, "num_experts": 64,
         "num_shared_expert": [1] * 32, "use_cla": False, "use_mixed_mlp_moe": True, "use_qk_norm": True,
         "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 1,
         "eos_token_id": 127960},
        {},
    ),
    "qwen2moe": (
        "Qwen2MoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 48, "use_sliding_window": True, "sliding_window": WINDOW,
         "layer_types": ["full_attention", "sliding_attention"] * 2},
        {"model_type": "qwen2_moe", "vocab_size": 151936, "hidden_size": 3584, "intermediate_size": 18944,
         "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_act": "silu",
         "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 65536,
         "use_sliding_window": False, "max_window_layers": 28, "decoder_sparse_step": 1, "num_experts": 64,
         "num_experts_per_tok": 8, "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480,
         "norm_topk_prob": False, "mlp_only_layers": [], "tie_word_embeddings": False, "bos_token_id": 151643,
         "eos_token_id": 151643},
        {"use_sliding_window": False, "layer_types": None},
    ),
}  # fmt: skip
