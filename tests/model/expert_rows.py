"""The rows of families with experts, as those of `family_rows`."""

from __future__ import annotations

from typing import Any

from helpers import WINDOW

# Class of transformers, fields of the small model, config.json of a real model, fields that llama.cpp fixes.
EXPERT_ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
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
