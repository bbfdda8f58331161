"""Small random networks with experts: transformers' configuration class, and the fields beside the common sizes."""

from __future__ import annotations

from typing import Any

import pytest

MOE_ARCHITECTURES = ("qwen3moe", "mixtral", "olmoe", "glm4moe", "deepseek2", "deepseek3", "gptoss")
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def spread_choices(model: Any) -> None:
    """Move the biases of the choice of experts off 0, where mistakes would not show."""
    import torch

    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(torch.randn_like(buffer) * 0.2)


def _later_config(name: str) -> Any:
    """A class that the oldest supported version of transformers does not have; tests with it are skipped there."""
    import transformers

    def missing(**fields: Any) -> Any:
        pytest.skip(f"this version of transformers has no {name}")

    return getattr(transformers, name, missing)


def moe_kinds() -> dict[str, tuple[Any, dict[str, Any]]]:
    import transformers as tf

    return {
        "qwen3moe": (tf.Qwen3MoeConfig, {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3,
                                         "moe_intermediate_size": 32, "norm_topk_prob": True}),
        "mixtral": (tf.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
        "olmoe": (tf.OlmoeConfig, {"num_experts": 8, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
        "glm4moe": (tf.Glm4MoeConfig, {"head_dim": 24, "n_routed_experts": 8, "num_experts_per_tok": 2,
                                       "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
                                       "num_hidden_layers": 3, "routed_scaling_factor": 1.8, "use_qk_norm": True,
                                       "attention_bias": True}),
        "deepseek2": (tf.DeepseekV2Config, {"n_routed_experts": 6, "num_experts_per_tok": 2, "kv_lora_rank": 32,
                                            "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                                            "v_head_dim": 20, "moe_intermediate_size": 32, "n_shared_experts": 2,
                                            "first_k_dense_replace": 1, "num_hidden_layers": 3, "head_dim": 8,
                                            "num_key_value_heads": 4}),
        "deepseek3": (tf.DeepseekV3Config, {"n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 32,
                                            "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                                            "v_head_dim": 20, "moe_intermediate_size": 32, "n_shared_experts": 1,
                                            "first_k_dense_replace": 1, "num_hidden_layers": 3, "head_dim": 8,
                                            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.6,
                                            "num_key_value_heads": 4}),
        "glm4moelite": (tf.Glm4MoeLiteConfig, {"n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 32,
                                               "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                                               "v_head_dim": 20, "moe_intermediate_size": 32, "n_shared_experts": 1,
                                               "num_hidden_layers": 3, "num_key_value_heads": 4}),
        "glmdsa": (_later_config("GlmMoeDsaConfig"), {
                                        "n_routed_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 32,
                                        "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
                                        "v_head_dim": 20, "moe_intermediate_size": 32, "n_shared_experts": 1,
                                        "num_hidden_layers": 3, "num_key_value_heads": 4, "first_k_dense_replace": 1,
                                        "index_n_heads": 32, "index_head_dim": 16, "index_topk": 6,
                                        "indexer_types": ["full", "full", "shared"], "pad_token_id": None}),
        "gptoss": (tf.GptOssConfig, {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
                                     "sliding_window": 5, "rope_parameters": PLAIN_ROPE}),
    }  # fmt: skip
