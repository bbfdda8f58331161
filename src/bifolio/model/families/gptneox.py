"""GPT-NeoX and Pythia: attention and MLP side by side, each with a layer norm of its own; rope on a part of each head.

Folders store queries, keys and values head by head in one matrix, GGUF files one behind the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, write_activation
from bifolio.model.stored_form import Joined, StoredForm, joined_heads, reading, writing
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

NETWORK: dict[str, Any] = {"norm": "layer", "gated_mlp": False}
DEFAULTS = {"intermediate_size": 24576, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "attention_bias": True,
            "rotary_pct": 0.25, "rotary_emb_base": 10000.0, "use_parallel_residual": True, "bos_token_id": 0,
            "eos_token_id": 2}  # fmt: skip
HF_NAMES = replace(
    HF_LLAMA,
    embedding="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}.",
    qkv=("attention.query", "attention.key", "attention.value"),
    output="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out",
)


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    raw |= {"partial_rotary_factor": raw["rotary_pct"], "rope_theta": raw["rotary_emb_base"]}
    raw |= {"num_key_value_heads": None, "head_dim": None}  # transformers does not read them
    return decoder_from_hf(
        raw,
        name,
        norm_eps=float(raw["layer_norm_eps"]),
        mlp_bias=True,
        **NETWORK,
        **side_by_side(bool(raw["use_parallel_residual"])),
    )


def side_by_side(parallel: bool) -> dict[str, bool]:
    return {"parallel_block": parallel, "parallel_norms": parallel}


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    rope = config.ropes[0]
    return {
        **decoder_to_hf(config),
        "layer_norm_eps": config.norm_eps,
        "hidden_act": write_activation(config, "gelu"),
        "attention_bias": config.qkv_bias,
        "rotary_pct": rope.rotary_dim / config.head_dim,
        "rotary_emb_base": rope.theta,
        "use_parallel_residual": config.parallel_block,
    }


def folder_form(config: ModelConfig) -> StoredForm:
    rows = np.arange(3 * config.query_size).reshape(config.num_heads, 3, config.head_dim)
    parts = tuple((name, rows[:, n].reshape(-1)) for n, name in enumerate(HF_NAMES.qkv))
    return StoredForm(joined=(Joined("attention.query_key_value", parts),))


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    parallel = side_by_side(metadata.flag(".use_parallel_residual", True))
    return decoder_from_gguf(file, metadata, name, activation="gelu", **NETWORK, **parallel)


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    return {"use_parallel_residual": config.parallel_block}


def gguf_form(config: ModelConfig) -> StoredForm:
    return joined_heads(config, "attn_qkv", GGUF_LLAMA.qkv)


FAMILY = Family(
    name="gptneox",
    hf_types=("gpt_neox",),
    hf_class="GPTNeoXForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=HF_NAMES,
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("gptneox",),
    written_as="gptneox",
    config_from_gguf=config_from_gguf,
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
    gguf_entries=gguf_entries,
    gguf_activation="gelu",
)
