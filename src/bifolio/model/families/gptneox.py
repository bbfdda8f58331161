"""GPT-NeoX and Pythia: attention and MLP side by side, each with a layer norm of its own; rope on a part of each head.

Folders store queries, keys and values head by head in one matrix, GGUF files one behind the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.decoder_fields import NORM_EPS
from bifolio.model.description import Reading, Writing
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.huggingface.rope_fields import read_rope, rope_parameters, rotated, scaling_object
from bifolio.model.stored_form import Joined, StoredForm, joined_heads, reading, writing
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

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


def read_ropes(values: Reading) -> tuple[RopeConfig, ...]:
    own, dim = rope_parameters(values), values["head_dim"]
    usual = {"partial_rotary_factor": values.json.get("rotary_pct"), "rope_theta": values.json.get("rotary_emb_base")}
    return (read_rope(values, own.with_defaults(usual), dim),)


def ropes_to_hf(values: Writing) -> dict[str, Any]:
    rope = values.config.ropes[0]
    own = {"rotary_pct": rotated(values), "rotary_emb_base": rope.theta}
    return {"rope_theta": rope.theta, "rope_scaling": scaling_object(rope), **own}


def folder_form(config: ModelConfig) -> StoredForm:
    rows = np.arange(3 * config.query_size).reshape(config.num_heads, 3, config.head_dim)
    parts = tuple((name, rows[:, n].reshape(-1)) for n, name in enumerate(HF_NAMES.qkv))
    return StoredForm(joined=(Joined("attention.query_key_value", parts),))


def gguf_form(config: ModelConfig) -> StoredForm:
    return joined_heads(config, "attn_qkv", GGUF_LLAMA.qkv)


FAMILY = Family(
    name="gptneox",
    network={"norm": "layer", "gated_mlp": False},
    fields=(
        NORM_EPS,
        Field("num_kv_heads", hf=None),
        Field("head_dim", hf=None),
        Field("ropes", hf=Form(read_ropes, ropes_to_hf)),
        Field("parallel_block", hf="use_parallel_residual", gguf="use_parallel_residual", default=True),
        Field("parallel_norms", default=lambda v: v["parallel_block"]),
    ),
    hf_types=("gpt_neox",),
    hf_class="GPTNeoXForCausalLM",
    hf_defaults={"intermediate_size": 24576, "hidden_act": "gelu", "attention_bias": True, "rotary_pct": 0.25,
                 "rotary_emb_base": 10000.0,
                 "bos_token_id": 0, "eos_token_id": 2},
    hf_implied={"mlp_bias": True},
    hf_always=("attention_bias",),
    hf_names=HF_NAMES,
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("gptneox",),
    gguf_implied={"activation": "gelu"},
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
)  # fmt: skip
