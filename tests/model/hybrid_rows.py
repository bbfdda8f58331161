"""The rows of hybrid families, as those of `family_rows`: a small random model, and the description of a real one."""

from __future__ import annotations

from typing import Any

from helpers import WINDOW

_DELTA = {"head_dim": 32, "rms_norm_eps": 1e-3, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
          "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
          "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}  # fmt: skip
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_chunk_size": 8}
_GRANITE = {**_MAMBA, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
            "logits_scaling": 0.7, "shared_intermediate_size": 96,
            "layer_types": ["mamba", "attention", "mamba", "mamba"]}  # fmt: skip
_FALCON = {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.6, "key_multiplier": 0.7, "mlp_multipliers": [0.8, 0.9],
           "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.1,
           "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7]}  # fmt: skip

_NEMOTRON = {"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
             "chunk_size": 8, "num_hidden_layers": 5,
             "time_step_min": 1e-30}  # fmt: skip  # below it transformers changes time steps of prompts, not of decodes

# Class of transformers, fields of the small model, config.json of a real model, fields that llama.cpp fixes.
HYBRID_ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "lfm2": (
        "Lfm2Config", {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False},
        {"model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "block_ff_dim": 12288, "num_hidden_layers": 16,
         "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000, "norm_eps": 1e-05,
         "rope_theta": 1000000.0, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0,
         "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
         "bos_token_id": 1, "eos_token_id": 7},
        {},
    ),
    "lfm2moe": (
        "Lfm2MoeConfig",
        {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1, "num_experts": 6,
         "num_experts_per_tok": 3, "moe_intermediate_size": 32},
        {"model_type": "lfm2_moe", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 7168,
         "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 8, "norm_eps": 1e-05,
         "max_position_embeddings": 128000, "rope_theta": 1000000.0, "conv_L_cache": 3, "conv_bias": False,
         "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
         "norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0,
         "layer_types": ["full_attention" if n in (2, 6, 10, 14, 18, 21) else "conv" for n in range(24)],
         "bos_token_id": 1, "eos_token_id": 7},
        {},
    ),
    "lfm3": (
        "Lfm3Config",
        {"layer_types": ["conv", "full_attention", "conv", "sliding_attention"], "head_dim": 24,
         "sliding_window": WINDOW},
        {"model_type": "lfm3", "vocab_size": 128000, "hidden_size": 2048, "intermediate_size": 7680,
         "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
         "max_position_embeddings": 128000, "norm_eps": 1e-05, "conv_L_cache": 7, "conv_bias": False,
         "layer_types": ["full_attention" if n % 4 == 2 else "sliding_attention" if n % 4 == 0 and n else "conv"
                         for n in range(24)],
         "rope_parameters": {
             "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}},
         "sliding_window": 256, "use_sandwich_norm": True, "use_attention_gate": True, "attention_bias": False,
         "tie_word_embeddings": True, "bos_token_id": 124894, "eos_token_id": 124900},
        None,
    ),
    "qwen3next": (
        "Qwen3NextConfig", {**_DELTA, **_EXPERTS},
        {"model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
         "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
         "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-06, "rope_theta": 10000000,
         "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
         "linear_num_value_heads": 32, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 512,
         "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
         "norm_topk_prob": True, "bos_token_id": 151643, "eos_token_id": 151645},
        {},
    ),
    "qwen35": (
        "Qwen3_5TextConfig", _DELTA,
        {"model_type": "qwen3_5", "tie_word_embeddings": True, "vision_config": {}, "text_config": {
            "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216,
            "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
            "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-06,
            "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "mtp_num_hidden_layers": 1, "eos_token_id": 248044,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                                "mrope_interleaved": True, "mrope_section": [11, 11, 10]}}},
        {},
    ),
    "qwen35moe": (
        "Qwen3_5MoeTextConfig", {**_DELTA, **_EXPERTS},
        {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "vision_config": {}, "text_config": {
            "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40,
            "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu",
            "max_position_embeddings": 262144, "rms_norm_eps": 1e-06, "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "eos_token_id": 248044,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
                                "mrope_interleaved": True, "mrope_section": [11, 11, 10]}}},
        {},
    ),
    "granitehybrid": (
        "GraniteMoeHybridConfig", {**_GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0},
        {"model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 1536, "intermediate_size": 512,
         "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_act": "silu",
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "embedding_multiplier": 12, "logits_scaling": 6,
         "residual_multiplier": 0.22, "attention_multiplier": 0.0078125, "num_local_experts": 64,
         "num_experts_per_tok": 6, "shared_intermediate_size": 1024, "position_embedding_type": "nope",
         "layer_types": ["attention" if n in (5, 15, 25, 35) else "mamba" for n in range(40)], "mamba_n_heads": 48,
         "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2,
         "mamba_conv_bias": True, "mamba_proj_bias": False, "tie_word_embeddings": True, "bos_token_id": 100257,
         "eos_token_id": 100257},
        {},
    ),
    "granitehybrid with experts": (
        "GraniteMoeHybridConfig",
        {**_GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32,
         "shared_intermediate_size": 48, "tie_word_embeddings": True},
        {"model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "embedding_multiplier": 12, "logits_scaling": 8,
         "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "num_local_experts": 0,
         "num_experts_per_tok": 0, "shared_intermediate_size": 8192, "position_embedding_type": "rope",
         "layer_types": ["attention"] * 40, "rope_theta": 10000000, "tie_word_embeddings": True,
         "bos_token_id": 100257, "eos_token_id": 100257},
        {},
    ),
    "falcon_h1": (
        "FalconH1Config", {**_MAMBA, **_FALCON, "head_dim": 16, "mamba_d_ssm": 128, "mamba_n_groups": 2},
        {"model_type": "falcon_h1", "vocab_size": 32784, "hidden_size": 1024, "intermediate_size": 2048,
         "num_hidden_layers": 36, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
         "hidden_act": "silu", "max_position_embeddings": 16384, "rms_norm_eps": 1e-05,
         "rope_theta": 100000000000.0, "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
         "mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
         "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False,
         "mamba_rms_norm": False, "mamba_norm_before_gate": False, "projectors_bias": False,
         "embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625, "key_multiplier": 0.390625,
         "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "ssm_in_multiplier": 1.25,
         "ssm_out_multiplier": 0.23570226039551587, "mlp_multipliers": [0.8838834764831844, 0.5859375],
         "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
         "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 11},
        {},
    ),
    "nemotron_h": (
        "NemotronHConfig", {**_NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mamba", "mlp"]},
        {"model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4480, "intermediate_size": 15680,
         "num_hidden_layers": 56, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
         "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
         "max_position_embeddings": 131072, "layer_norm_epsilon": 1e-05, "mlp_hidden_act": "relu2", "mlp_bias": False,
         "attention_bias": False, "use_bias": False, "use_conv_bias": True, "mamba_num_heads": 128,
         "mamba_head_dim": 80, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "expand": 2,
         "mamba_hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 12},
        {},
    ),
    "nemotron_h with experts": (
        "NemotronHConfig",
        {**_NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"], "n_routed_experts": 6,
         "num_experts_per_tok": 3, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
         "routed_scaling_factor": 1.5},
        {"model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 2688, "intermediate_size": 1856,
         "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
         "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
         "max_position_embeddings": 262144, "layer_norm_epsilon": 1e-05, "mlp_hidden_act": "relu2", "mlp_bias": False,
         "attention_bias": False, "use_bias": False, "use_conv_bias": True, "mamba_num_heads": 64,
         "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "n_routed_experts": 128,
         "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
         "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
         "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
        {},
    ),
}  # fmt: skip
