"""Descriptions of real models with experts; `moe_configs.json` holds the `ModelConfig` that each must give."""

from __future__ import annotations

from typing import Any

_QWEN3_MOE = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "hidden_act": "silu", "rope_theta": 1000000.0,
    "attention_bias": False, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 48,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_experts": 128, "num_experts_per_tok": 8, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
_DEEPSEEK2 = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048, "intermediate_size": 10944,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06, "hidden_act": "silu", "rope_theta": 10000, "attention_bias": False, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "bos_token_id": 100000, "eos_token_id": 100001,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
                     "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096},
}  # fmt: skip
MOE_HF_CASES: dict[str, dict[str, Any]] = {
    "qwen3moe": _QWEN3_MOE,
    "qwen3moe with plain layers": {**_QWEN3_MOE, "mlp_only_layers": [0], "norm_topk_prob": False},
    "qwen3moe with experts in every second layer": {**_QWEN3_MOE, "decoder_sparse_step": 2},
    "mixtral": {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-05, "hidden_act": "silu", "rope_theta": 1000000.0, "sliding_window": None,
        "num_local_experts": 8, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2,
    },
    "olmoe": {
        "model_type": "olmoe", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 1024,
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-05, "hidden_act": "silu", "rope_theta": 10000.0, "attention_bias": False, "clip_qkv": None,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "eos_token_id": 50279,
    },
    "glm4moe": {
        "model_type": "glm4_moe", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 4, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "hidden_act": "silu", "rope_theta": 1000000,
        "rope_scaling": None, "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": False,
        "first_k_dense_replace": 1, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "eos_token_id": [151329, 151336, 151338],
    },
    "deepseek2": _DEEPSEEK2,
    "deepseek2 with groups of experts": {
        **_DEEPSEEK2, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "n_group": 8,
        "topk_group": 3, "topk_method": "group_limited_greedy", "n_routed_experts": 160, "routed_scaling_factor": 16.0,
        "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    },
    "deepseek2 of GLM": {
        "model_type": "glm4_moe_lite", "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
        "num_hidden_layers": 4, "num_attention_heads": 20, "num_key_value_heads": 20, "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-05, "hidden_act": "silu", "rope_theta": 1000000, "rope_scaling": None,
        "partial_rotary_factor": 1.0, "attention_bias": False, "kv_lora_rank": 512, "q_lora_rank": 768,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts": 64,
        "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "eos_token_id": [154820, 154827, 154829],
    },
    "gptoss": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "hidden_act": "silu", "rope_theta": 150000,
        "attention_bias": True, "num_local_experts": 32, "experts_per_token": 4, "num_experts_per_tok": 4,
        "sliding_window": 128, "swiglu_limit": 7.0, "eos_token_id": 200002,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096},
    },
}  # fmt: skip

# Architecture, entries of the header (those that begin with a dot are the architecture's), and shapes of tensors.
_SIZES = {".embedding_length": 64, ".block_count": 3, ".feed_forward_length": 160, ".attention.head_count": 4,
          ".attention.head_count_kv": 2, ".context_length": 4096, ".attention.layer_norm_rms_epsilon": 1e-6,
          ".expert_count": 8, ".expert_used_count": 2}  # fmt: skip
_SHAPES: dict[str, tuple[int, ...]] = {"token_embd.weight": (97, 64), **{f"filler.{i}": (1,) for i in range(20)}}
MOE_GGUF_CASES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "llama with experts": ("llama", _SIZES, {**_SHAPES, "blk.0.ffn_down_exps.weight": (8, 64, 160)}),
    "qwen3moe": (
        "qwen3moe", {**_SIZES, ".attention.key_length": 32, ".attention.value_length": 32,
                     ".expert_feed_forward_length": 96},
        {**_SHAPES, "blk.0.ffn_down_exps.weight": (8, 64, 96)},
    ),
    "olmoe": ("olmoe", _SIZES, {**_SHAPES, "blk.0.ffn_down_exps.weight": (8, 64, 160)}),
    "glm4moe": (
        "glm4moe", {**_SIZES, ".leading_dense_block_count": 1, ".expert_shared_count": 1, ".expert_weights_norm": True,
                    ".expert_weights_scale": 2.5, ".nextn_predict_layers": 1, ".rope.dimension_count": 8},
        {**_SHAPES, "blk.1.ffn_down_exps.weight": (8, 64, 96), "blk.1.ffn_up_shexp.weight": (96, 64),
         "blk.1.exp_probs_b.bias": (8,), "blk.0.attn_q_norm.weight": (16,)},
    ),
    "deepseek2": (
        "deepseek2", {**_SIZES, ".attention.head_count_kv": 1, ".attention.key_length": 40, ".rope.dimension_count": 8,
                      ".attention.value_length": 32, ".attention.key_length_mla": 24, ".attention.value_length_mla": 16,
                      ".attention.kv_lora_rank": 32, ".leading_dense_block_count": 1, ".expert_gating_func": 1,
                      ".rope.scaling.type": "yarn", ".rope.scaling.factor": 40.0,
                      ".rope.scaling.original_context_length": 512, ".rope.scaling.yarn_log_multiplier": 0.0707},
        {**_SHAPES, "blk.1.ffn_down_exps.weight": (8, 64, 96), "blk.1.ffn_up_shexp.weight": (192, 64)},
    ),
    "deepseek2 of GLM": (
        "deepseek2", {**_SIZES, ".attention.head_count_kv": 1, ".attention.key_length": 40, ".rope.dimension_count": 8,
                      ".attention.value_length": 32, ".attention.key_length_mla": 24, ".attention.value_length_mla": 16,
                      ".attention.kv_lora_rank": 32, ".leading_dense_block_count": 1, ".expert_weights_norm": True,
                      ".expert_weights_scale": 1.8},
        {**_SHAPES, "blk.1.ffn_down_exps.weight": (8, 64, 96), "blk.1.ffn_up_shexp.weight": (96, 64),
         "blk.1.exp_probs_b.bias": (8,)},
    ),
    "gptoss": (
        "gpt-oss", {**_SIZES, ".expert_feed_forward_length": 96, ".attention.sliding_window": 128,
                    ".rope.scaling.type": "yarn", ".rope.scaling.factor": 32.0,
                    ".rope.scaling.original_context_length": 512},
        {**_SHAPES, "blk.0.ffn_down_exps.weight": (8, 64, 96), "blk.0.ffn_down_exps.bias": (8, 64),
         "blk.0.ffn_gate_inp.bias": (8,), "output.weight": (97, 64)},
    ),
}  # fmt: skip
