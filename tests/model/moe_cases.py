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
}  # fmt: skip
