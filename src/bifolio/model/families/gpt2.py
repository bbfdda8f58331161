"""GPT-2: layer norms with biases, learned positions, an ungated MLP. Folders store layer matrices transposed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import common_fields, matrix_rows
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import Raw, optional_int, read_activation, token_ids, write_activation
from bifolio.model.tensor_names import GGUF_LLAMA, TensorNames

NETWORK: dict[str, Any] = {"norm": "layer", "gated_mlp": False, "learned_positions": True}
BIASES: dict[str, Any] = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    d, heads = int(raw["n_embd"]), int(raw["n_head"])
    if raw.get("scale_attn_by_inverse_layer_idx") or raw.get("reorder_and_upcast_attn"):
        raise UnsupportedModelError("GPT-2 with attention scaled by layer index is not supported")
    return ModelConfig(
        architecture=name,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=d,
        num_layers=int(raw["n_layer"]),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=d // heads,
        intermediate_size=int(raw.get("n_inner") or 4 * d),
        max_position=int(raw["n_positions"]),
        norm_eps=float(raw.get("layer_norm_epsilon", 1e-5)),
        activation=read_activation(raw.get("activation_function", "gelu_new")),
        tie_embeddings=bool(raw.get("tie_word_embeddings", True)),
        bos_token_id=optional_int(raw.get("bos_token_id")),
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        **NETWORK,
        **BIASES,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_position,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": write_activation(config, "gelu_new"),
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    return ModelConfig(
        **common_fields(file, metadata, name),
        max_position=matrix_rows(file, "position_embd.weight"),
        norm_eps=metadata.number(".attention.layer_norm_epsilon"),
        activation="gelu_tanh",
        **NETWORK,
    )


def fresh_config(*, hidden_size: int, num_heads: int, num_kv_heads: int, **sizes: Any) -> ModelConfig:
    """Configuration for training; every head has its own keys and values, so `num_kv_heads` is ignored."""
    return ModelConfig(
        architecture="gpt2",
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        activation="gelu_tanh",
        tie_embeddings=True,
        **sizes,
        **NETWORK,
        **BIASES,
    )


FAMILY = Family(
    name="gpt2",
    hf_types=("gpt2",),
    hf_class="GPT2LMHeadModel",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=TensorNames(
        embedding="transformer.wte",
        positions="transformer.wpe",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        mlp_norm="ln_2",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        final_norm="transformer.ln_f",
        head="lm_head",
        transposed=True,
    ),
    gguf_architectures=("gpt2",),
    written_as="gpt2",
    config_from_gguf=config_from_gguf,
    gguf_names=replace(GGUF_LLAMA, positions="position_embd", qkv=("attn_qkv",), up=("ffn_up",)),
    gguf_activation="gelu_tanh",
    fresh_config=fresh_config,
)
