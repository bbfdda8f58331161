"""Bamba: Mamba-2 layers, attention whose heads are rotated by half in a few, and plain MLPs.

GGUF files describe it as a Granite hybrid with factors of 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.families.granitehybrid import GGUF_MAMBA, gguf_entries, mamba_from_hf, mamba_names, mamba_to_hf
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, nested_rope
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 262144, "bos_token_id": 1,
            "eos_token_id": 2}  # fmt: skip
ROTATED = 0.5  # part of a head; transformers replaces the value of a folder unless it is among the parameters of rope


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    layers, attention = range(int(raw["num_hidden_layers"])), raw.get("attn_layer_indices") or ()
    has_attention = tuple(layer for layer in layers if layer in attention)
    mamba = tuple(layer for layer in layers if layer not in attention)
    return decoder_from_hf(
        {**DEFAULTS, **raw, "partial_rotary_factor": ROTATED},
        name,
        recurrent=mamba_from_hf(raw, mamba, has_attention),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    own, factors = config.recurrent, (config.embedding_scale, config.residual_scale, config.logit_scale)
    if own is None or config.moe is not None or factors != (1.0, 1.0, 1.0) or config.attention_scale:
        raise UnsupportedModelError("a folder of Bamba describes Mamba layers and MLPs, without experts and factors")
    return {
        **nested_rope(config, decoder_to_hf(config)),
        **mamba_to_hf(config, own),
        "attn_layer_indices": list(own.attention_layers),
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    }


FAMILY = Family(
    name="bamba",
    hf_types=("bamba",),
    hf_class="BambaForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(
        HF_LLAMA,
        mlp_norm="pre_ff_layernorm",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        final_norm="model.final_layernorm",
        recurrent=mamba_names("mamba"),
    ),
    written_as="granitehybrid",
    gguf_names=replace(GGUF_LLAMA, recurrent=GGUF_MAMBA),
    gguf_interleaved=True,
    gguf_entries=gguf_entries,
)
