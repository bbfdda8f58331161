"""Small random networks with experts: transformers' configuration class, and the fields beside the common sizes."""

from __future__ import annotations

from typing import Any

MOE_ARCHITECTURES = ("qwen3moe", "mixtral")


def moe_kinds() -> dict[str, tuple[Any, dict[str, Any]]]:
    import transformers as tf

    return {
        "qwen3moe": (tf.Qwen3MoeConfig, {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3,
                                         "moe_intermediate_size": 32, "norm_topk_prob": True}),
        "mixtral": (tf.MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    }  # fmt: skip
