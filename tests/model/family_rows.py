"""One row for each family that is tested by its row alone: a small random model, and the description of a real one.

A row needs no other code: `test_family_rows.py` compares its model with transformers and llama.cpp, from a folder and
from a GGUF file, and `family_cases.py` reads the real description.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from expert_rows import EXPERT_ROWS
from gemma_rows import GEMMA_ROWS
from hybrid_rows import HYBRID_ROWS
from later_rows import LATER_ROWS
from latest_rows import LATEST_ROWS, SAVED
from newest_rows import NEWEST_ROWS
from renamed_folders import as_exaone

from helpers import INIT_RANGE, WINDOW, fresh_folder

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": INIT_RANGE}  # fmt: skip


class Row(NamedTuple):
    """A family of `model/families/`."""

    config: str  # class of transformers
    tiny: dict[str, Any]  # fields of the small model beside SIZES
    real: dict[str, Any]  # config.json of a real model
    saved: dict[str, Any] = {}  # noqa: RUF012  fields of config.json that replace those that transformers saved
    peer: dict[str, Any] | None = {}  # noqa: RUF012  fields that llama.cpp fixes; None: it does not know the architecture


ROWS: dict[str, Row] = {
    "arcee": Row(
        "ArceeConfig",
        {"head_dim": 24, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                                             "original_max_position_embeddings": 32}},
        {"model_type": "arcee", "vocab_size": 128004, "hidden_size": 2560, "intermediate_size": 18432,
         "num_hidden_layers": 36, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128,
         "hidden_act": "relu2", "max_position_embeddings": 65536, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
         "rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 20.0, "mscale": 1.0, "beta_fast": 32.0,
                          "beta_slow": 1.0, "original_max_position_embeddings": 4096},
         "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": 128000,
         "eos_token_id": 128003},
    ),
    "cohere": Row(
        "CohereConfig", {"logit_scale": 0.75},
        {"model_type": "cohere", "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528,
         "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 64, "hidden_act": "silu",
         "max_position_embeddings": 8192, "model_max_length": 131072, "layer_norm_eps": 1e-05, "logit_scale": 0.0625,
         "rope_theta": 8000000.0, "use_qk_norm": False, "attention_bias": False, "bos_token_id": 5,
         "eos_token_id": 255001},
    ),
    "cohere2": Row(
        "Cohere2Config", {"sliding_window": WINDOW, "logit_scale": 0.75},
        {"model_type": "cohere2", "vocab_size": 256000, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 132096, "layer_norm_eps": 1e-05, "logit_scale": 0.25, "rope_theta": 50000,
         "sliding_window": 4096, "sliding_window_pattern": 4, "bos_token_id": 5, "eos_token_id": 255001},
    ),
    "ernie4_5": Row(
        "Ernie4_5Config", {"head_dim": 24},
        {"model_type": "ernie4_5", "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072,
         "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000,
         "use_bias": False, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
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
    "falcon": Row(
        "FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
        {"model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
         "num_attention_heads": 71, "layer_norm_epsilon": 1e-05, "alibi": False, "bias": False, "multi_query": True,
         "new_decoder_architecture": False, "parallel_attn": True, "bos_token_id": 11, "eos_token_id": 11},
    ),
    "falcon3": Row(
        "LlamaConfig", {"head_dim": 32},
        {"model_type": "llama", "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 9216,
         "num_hidden_layers": 22, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 256,
         "hidden_act": "silu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-06, "rope_theta": 1000042,
         "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "eos_token_id": 11},
    ),
    "gemma": Row(
        "GemmaConfig", {"head_dim": 24, "hidden_act": "gelu"},
        {"model_type": "gemma", "vocab_size": 256000, "hidden_size": 2048, "intermediate_size": 16384,
         "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
         "hidden_act": "gelu", "max_position_embeddings": 8192, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
         "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
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
    "glm": Row(
        "GlmConfig", {"head_dim": 16, "partial_rotary_factor": 0.5},
        {"model_type": "glm", "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696,
         "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0,
         "attention_bias": True, "tie_word_embeddings": False, "eos_token_id": [151329, 151336, 151338]},
    ),
    "glm4": Row(
        "Glm4Config", {"head_dim": 24, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.75},
        {"model_type": "glm4", "vocab_size": 151552, "hidden_size": 6144, "intermediate_size": 23040,
         "num_hidden_layers": 61, "num_attention_heads": 48, "num_key_value_heads": 2, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
         "attention_bias": False, "partial_rotary_factor": 0.5, "tie_word_embeddings": False,
         "eos_token_id": [151329, 151336, 151338], "pad_token_id": 151329},
    ),
    "gptneox": Row(
        "GPTNeoXConfig", {"rotary_pct": 0.5, "rotary_emb_base": 1000.0},
        {"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 24, "num_attention_heads": 16, "hidden_act": "gelu", "max_position_embeddings": 2048,
         "layer_norm_eps": 1e-05, "rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True,
         "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0},
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
    "hunyuan_dense": Row(
        "HunYuanDenseV1Config",
        {"head_dim": 24,
         "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 10000.0, "factor": 1.0}},
        {"model_type": "hunyuan_v1_dense", "vocab_size": 120818, "hidden_size": 2048, "intermediate_size": 6144,
         "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
         "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                          "mscale_all_dim": 0.0, "type": "dynamic"},
         "attention_bias": False, "tie_word_embeddings": True, "bos_token_id": 120000, "eos_token_id": 120007},
    ),
    "internlm3": Row(
        "LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
        {"model_type": "internlm3", "vocab_size": 128512, "hidden_size": 4096, "intermediate_size": 10240,
         "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 50000000,
         "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "qkv_bias": False, "bias": False,
         "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
        saved={"model_type": "internlm3", "qkv_bias": True, "bias": True},  # transformers has no class for it
    ),
    "ministral": Row(
        "MinistralConfig", {"sliding_window": WINDOW, "head_dim": 24,
                            "layer_types": ["full_attention", *["sliding_attention"] * 3]},
        {"model_type": "ministral", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 12288,
         "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 100000000.0,
         "sliding_window": 32768, "layer_types": ["full_attention", *["sliding_attention"] * 3],
         "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
        peer={"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "mistral3": Row(
        "Ministral3Config",
        {"head_dim": 24,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "beta_fast": 32.0,
                             "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1}},
        {"model_type": "mistral3", "vision_config": {}, "text_config": {
         "model_type": "ministral3", "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 9216,
         "num_hidden_layers": 26, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 262144, "rms_norm_eps": 1e-05, "sliding_window": None,
         "rope_parameters": {"type": "yarn", "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0,
                             "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
                             "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
         "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}},
    ),
    "nemotron": Row(
        "NemotronConfig", {"head_dim": 16, "partial_rotary_factor": 0.75, "attention_bias": True, "mlp_bias": True},
        {"model_type": "nemotron", "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 9216,
         "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "relu2", "max_position_embeddings": 4096, "norm_eps": 1e-05, "rope_theta": 10000.0,
         "partial_rotary_factor": 0.5, "rope_percent": 0.5, "attention_bias": False, "mlp_bias": False,
         "tie_word_embeddings": False, "bos_token_id": 2, "eos_token_id": 3},
    ),
    "olmo": Row(
        "OlmoConfig", {"rope_theta": 1000.0},
        {"model_type": "olmo", "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 8192,
         "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu",
         "max_position_embeddings": 2048, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False,
         "clip_qkv": None, "tie_word_embeddings": True, "eos_token_id": 50279, "pad_token_id": 1},
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
    "phi": Row(
        "PhiConfig", {"partial_rotary_factor": 0.75},
        {"model_type": "phi", "vocab_size": 51200, "hidden_size": 2560, "intermediate_size": 10240,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "gelu_new",
         "max_position_embeddings": 2048, "layer_norm_eps": 1e-05, "rope_theta": 10000.0, "rope_scaling": None,
         "partial_rotary_factor": 0.4, "qk_layernorm": False, "tie_word_embeddings": False, "bos_token_id": 50256,
         "eos_token_id": 50256},
    ),
    "phi4": Row(
        "Phi3Config",
        {"tie_word_embeddings": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}},
        {"model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 8192,
         "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8, "hidden_act": "silu",
         "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
         "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True,
         "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48,
                          "long_factor": [1.0 + i / 8 for i in range(48)]},
         "bos_token_id": 199999, "eos_token_id": 199999},
    ),
    "seed_oss": Row(
        "SeedOssConfig", {"head_dim": 24},
        {"model_type": "seed_oss", "vocab_size": 155136, "hidden_size": 5120, "intermediate_size": 27648,
         "num_hidden_layers": 64, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128,
         "hidden_act": "silu", "max_position_embeddings": 524288, "rms_norm_eps": 1e-06, "rope_theta": 10000000.0,
         "rope_scaling": {"rope_type": "default"}, "attention_bias": True, "attention_out_bias": False,
         "mlp_bias": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2},
    ),
    "smollm3": Row(
        "SmolLM3Config", {},
        {"model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
         "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_act": "silu",
         "max_position_embeddings": 65536, "rms_norm_eps": 1e-06, "rope_theta": 5000000.0, "rope_scaling": None,
         "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "use_sliding_window": False,
         "sliding_window": None, "bos_token_id": None, "eos_token_id": 128012},
    ),
    "stablelm": Row(
        "StableLmConfig", {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "use_parallel_residual": True},
        {"model_type": "stablelm", "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 5632,
         "num_hidden_layers": 24, "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu",
         "max_position_embeddings": 4096, "layer_norm_eps": 1e-05, "rope_theta": 10000, "use_qkv_bias": True,
         "partial_rotary_factor": 0.25, "use_parallel_residual": False, "qk_layernorm": False,
         "tie_word_embeddings": False, "bos_token_id": 100257, "eos_token_id": 100257},
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
ADDED = {**EXPERT_ROWS, **HYBRID_ROWS, **GEMMA_ROWS, **LATER_ROWS, **LATEST_ROWS, **NEWEST_ROWS}
ROWS |= {name: Row(config, tiny, real, SAVED.get(name, {}), peer) for name, (config, tiny, real, peer) in ADDED.items()}


NEW_ORACLE = (5, 22)  # of transformers: older ones rotate some of these otherwise, or do not read folders of theirs
OF_NEW_ORACLE = {"exaone4", "hunyuan_dense", "olmo3", "stablelm", *GEMMA_ROWS, *LATER_ROWS, *LATEST_ROWS, *NEWEST_ROWS}


UNNAMED = {"Mistral4Config"}  # `AutoModelForCausalLM` lacks their classes
UNREAD = {"longcat_flash": 2 * 3 * 2 * 32 * 64, "opt": 2 * 64}  # parameters of a row that the network does not read


def row_model(name: str, **overrides: Any) -> Any:
    """The small model of a row with random weights; skips the test where transformers is too old for the row."""
    import torch
    import transformers

    is_old = name in OF_NEW_ORACLE and tuple(map(int, transformers.__version__.split(".")[:2])) < NEW_ORACLE
    if is_old or not hasattr(transformers, ROWS[name].config):
        pytest.skip(f"transformers {transformers.__version__} is no oracle of {name}")
    row = ROWS[name]
    config = getattr(transformers, row.config)(**{**SIZES, **row.tiny, **overrides})
    config._attn_implementation = "eager"
    if row.config in UNNAMED:
        own = getattr(transformers, row.config.removesuffix("Config") + "ForCausalLM")
        transformers.AutoModelForCausalLM.register(type(config), own, exist_ok=True)
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for field, parameter in model.named_parameters():
            if parameter.ndim == 1 or field.endswith(("e_score_correction_bias", "gate_bias", "position_bias")):
                # norms start at 1 and biases at 0: mistakes in either would not show
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for field, buffer in model.named_buffers():
            if field.endswith(("layer_scalar", "e_score_correction_bias")):  # factors and biases that are no parameters
                buffer.add_(torch.randn_like(buffer) * 0.2)
            if field.endswith("tid2eid"):  # the experts of each token
                buffer.copy_(torch.rand(len(buffer), config.n_routed_experts).argsort()[:, : buffer.shape[1]])
    return model


@cache
def row_folder(name: str) -> tuple[Any, Path]:
    """The small model of a row, and the folder that its `save_pretrained` wrote."""
    model, folder = row_model(name), fresh_folder(name)
    save_row(name, model, folder)
    return model, folder


def save_row(name: str, model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | ROWS[name].saved))
    if name == "exaone":  # transformers has no class for it
        as_exaone(folder)
