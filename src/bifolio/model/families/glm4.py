"""GLM-4-0414 and GLM-Z1: norms before and after attention and MLP, biases on queries, keys and values.

Gate and up are one matrix; rope turns neighbouring pairs of the first half of each head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7,
            "attention_bias": True, "partial_rotary_factor": 0.5,
            "eos_token_id": [151329, 151336, 151338]}  # fmt: skip
HF_NAMES = replace(HF_LLAMA, up=("mlp.gate_up_proj",))
GGUF_NAMES = replace(GGUF_LLAMA, up=("ffn_up",))


def half_rotated_from_hf(raw: Raw, name: str, **overrides: Any) -> ModelConfig:
    """The fields of all GLM models without experts."""
    return decoder_from_hf({**DEFAULTS, **raw}, name, output_bias=False, mlp_bias=False, layer_window=(), **overrides)


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    return half_rotated_from_hf(raw, name, post_norms=True)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        **decoder_to_hf(config),
        "attention_bias": config.qkv_bias,
        "partial_rotary_factor": config.ropes[0].rotary_dim / config.head_dim,
        "pad_token_id": None,
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    """Layers behind the last one are heads for multi-token prediction, which are not used."""
    if metadata.has(".rope.dimension_sections"):
        raise UnsupportedModelError(f"{file.path}: GLM models of images (rope with sections) are not supported")
    layers = metadata.count(".block_count") - metadata.count(".nextn_predict_layers", 0)
    return decoder_from_gguf(file, metadata, name, post_norms=True, num_layers=layers)


FAMILY = Family(
    name="glm4",
    hf_types=("glm4",),
    hf_class="Glm4ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(HF_NAMES, post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"),
    hf_interleaved=True,
    gguf_architectures=("glm4",),
    written_as="glm4",
    config_from_gguf=config_from_gguf,
    gguf_names=GGUF_NAMES,
    gguf_interleaved=True,
)
