"""One row for each family that is tested by its row alone: a small random model, and the description of a real one.

A row needs no other code: `test_family_rows.py` compares its model with transformers and llama.cpp, from a folder and
from a GGUF file, and `family_cases.py` reads the real description.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from helpers import INIT_RANGE, WINDOW, fresh_folder

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": INIT_RANGE}  # fmt: skip


class Row(NamedTuple):
    """A family of `model/families/`."""

    config: str  # class of transformers
    tiny: dict[str, Any]  # fields of the small model beside SIZES
    real: dict[str, Any]  # config.json of a real model
    peer: dict[str, Any] | None = {}  # noqa: RUF012  fields that llama.cpp fixes; None: it does not know the architecture


ROWS: dict[str, Row] = {
    "cohere2": Row(
        "Cohere2Config", {"sliding_window": WINDOW, "logit_scale": 0.75},
        {"model_type": "cohere2", "vocab_size": 256000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 132096, "layer_norm_eps": 1e-05, "logit_scale": 0.25, "rope_theta": 50000,
         "sliding_window": 4096, "sliding_window_pattern": 4, "bos_token_id": 5, "eos_token_id": 255001},
    ),
    "exaone4": Row(
        "Exaone4Config", {"sliding_window": WINDOW, "tie_word_embeddings": True},
        {"model_type": "exaone4", "vocab_size": 102400, "hidden_size": 5120, "intermediate_size": 27392,
         "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
         "rope_scaling": {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192},
         "sliding_window": 4096, "sliding_window_pattern": "LLLG", "bos_token_id": 1, "eos_token_id": 361},
        peer={"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "gemma2": Row(
        "Gemma2Config",
        {"sliding_window": WINDOW, "head_dim": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 1.5,
         "final_logit_softcapping": 8.0},
        {"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
         "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
         "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
         "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "query_pre_attn_scalar": 256,
         "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "bos_token_id": 2, "eos_token_id": 1},
        peer={"query_pre_attn_scalar": 24},
    ),
    "granite": Row(
        "GraniteConfig",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.2, "logits_scaling": 0.7,
         "attention_bias": True},
        {"model_type": "granite", "vocab_size": 49155, "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 5000000.0,
         "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625,
         "logits_scaling": 8.0, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "olmo2": Row(
        "Olmo2Config", {},
        {"model_type": "olmo2", "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu",
         "max_position_embeddings": 4096, "rms_norm_eps": 1e-06, "rope_theta": 500000, "attention_bias": False,
         "tie_word_embeddings": False, "eos_token_id": 100257},
    ),
    "olmo3": Row(
        "Olmo3Config",
        {"sliding_window": WINDOW,
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        {"model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008,
         "num_hidden_layers": 8, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
         "max_position_embeddings": 65536, "rms_norm_eps": 1e-06, "rope_theta": 500000, "attention_bias": False,
         "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192,
                          "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1},
         "sliding_window": 4096, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2,
         "tie_word_embeddings": False, "eos_token_id": 100257},
    ),
    "smollm3": Row(
        "SmolLM3Config", {},
        {"model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
         "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_act": "silu",
         "max_position_embeddings": 65536, "rms_norm_eps": 1e-06, "rope_theta": 5000000.0, "rope_scaling": None,
         "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "use_sliding_window": False,
         "sliding_window": None, "bos_token_id": None, "eos_token_id": 128012},
    ),
    "starcoder2": Row(
        "Starcoder2Config", {"sliding_window": WINDOW},
        {"model_type": "starcoder2", "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288,
         "num_hidden_layers": 30, "num_attention_heads": 24, "num_key_value_heads": 2,
         "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 16384, "norm_epsilon": 1e-05,
         "rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": True, "bos_token_id": 0,
         "eos_token_id": 0},
        peer={"sliding_window": None},
    ),
}  # fmt: skip


def row_model(name: str, **overrides: Any) -> Any:
    """The small model of a row with random weights."""
    import torch
    import transformers

    row = ROWS[name]
    config = getattr(transformers, row.config)(**{**SIZES, **row.tiny, **overrides})
    config._attn_implementation = "eager"
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at 1 and biases at 0: mistakes in either would not show
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@cache
def row_folder(name: str) -> tuple[Any, Path]:
    """The small model of a row, and the folder that its `save_pretrained` wrote."""
    model, folder = row_model(name), fresh_folder(name)
    model.save_pretrained(folder)
    return model, folder
