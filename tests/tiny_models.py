"""Small random models of every architecture, made by transformers: the oracle of the network."""

from __future__ import annotations

from typing import Any

from moe_models import MOE_ARCHITECTURES, moe_kinds, spread_choices

ARCHITECTURES = ["gpt2", "llama", "llama3-rope", "smollm2", "mistral", "qwen2", "qwen3", "gemma3", "phi3",
                 *MOE_ARCHITECTURES]  # fmt: skip


def tiny_transformers_model(name: str, *, vocab_size: int = 97, seed: int = 0) -> Any:
    """A float32 model in evaluation mode with eager attention; sliding windows are shorter than the tests' prompts."""
    import torch
    import transformers as tf

    common = {"vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
              "attn_implementation": "eager", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
    llama3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
              "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    torch.manual_seed(seed)
    configs = {
        "gpt2": lambda: tf.GPT2Config(vocab_size=vocab_size, n_embd=64, n_layer=2, n_head=4, n_positions=128,
                                      bos_token_id=1, eos_token_id=2, attn_implementation="eager"),
        "llama": lambda: tf.LlamaConfig(**common, attention_bias=True, mlp_bias=True),
        "llama3-rope": lambda: tf.LlamaConfig(**common, rope_parameters=llama3, tie_word_embeddings=True),
        "smollm2": lambda: tf.LlamaConfig(**{**common, "num_attention_heads": 7, "num_key_value_heads": 1,
                                             "head_dim": 16, "hidden_size": 56}, tie_word_embeddings=True),
        "mistral": lambda: tf.MistralConfig(**common, sliding_window=5),
        "qwen2": lambda: tf.Qwen2Config(**common),
        "qwen3": lambda: tf.Qwen3Config(**common, head_dim=16),
        "gemma3": lambda: tf.Gemma3TextConfig(**common, head_dim=16, sliding_window=5, query_pre_attn_scalar=20,
                                              layer_types=["sliding_attention", "full_attention"]),
        "phi3": lambda: tf.Phi3Config(**common),
    }  # fmt: skip
    if name in MOE_ARCHITECTURES:
        make, extra = moe_kinds()[name]
        lists = {field: list(value) if isinstance(value, tuple) else value for field, value in extra.items()}
        config = make(**{**common, **lists})
    else:
        config = configs[name]()
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # biases and norms that start as constants would hide mistakes
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        spread_choices(model)
    return model
