"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts beside a gated shared MLP.

Layers behind the last one (`mtp`, `nextn`) are heads for multi-token prediction (`model.next_token_head`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RecurrentConfig
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import ADDS_UP, EXPERTS, SPARSE_STEPS
from bifolio.model.families.family import Family
from bifolio.model.fields import REQUIRED, Field, Form, Key
from bifolio.model.huggingface.rope_fields import NESTED
from bifolio.model.next_token_names import GGUF_QWEN_NEXT_TOKEN, QWEN_NEXT_TOKEN
from bifolio.model.recurrent_fields import EITHER, HEADS
from bifolio.model.recurrent_tensors import RecurrentNames
from bifolio.model.stored_form import Joined, Rows, StoredForm, reading, writing
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.window_fields import FULL, TYPES, named_kinds

NORM_OFFSET = 1.0
INTERVAL = 4  # one layer of so many has attention
HF_NAMES = replace(
    HF_LLAMA,
    gate="self_attn.gate",
    shared_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    recurrent=RecurrentNames(
        (("linear_attn.in_proj_qkv", 3), ("linear_attn.in_proj_z", 1), ("linear_attn.in_proj_b", 1),
         ("linear_attn.in_proj_a", 1)),
        conv="linear_attn.conv1d",
        output="linear_attn.out_proj",
        decay="linear_attn.A_log",
        bias="linear_attn.dt_bias",
        norm="linear_attn.norm",
        conv_axis=True,
        decay_log=True,
    ),
)  # fmt: skip
GGUF_NAMES = replace(
    GGUF_LLAMA,
    gate="query_gate",
    mlp_norm="post_attention_norm",
    recurrent=RecurrentNames(
        (("attn_qkv", 3), ("attn_gate", 1), ("ssm_beta", 1), ("ssm_alpha", 1)),
        conv="ssm_conv1d",
        output="ssm_out",
        decay="ssm_a",
        bias="ssm_dt.bias",
        norm="ssm_norm",
    ),
)


# -- the description --------------------------------------------------------------------------------------------------
def attention_from_hf(values: Reading) -> tuple[bool, ...]:
    if values.json.get(TYPES):
        return tuple(kind == FULL for kind in named_kinds(values))
    period = values.json.count("full_attention_interval", INTERVAL)
    return tuple((layer + 1) % period == 0 for layer in values.layers)


def attention_from_gguf(values: Reading) -> tuple[bool, ...]:
    header, key = values.header, ".attention.recurrent_layers"
    period, recurs = header.count(".full_attention_interval", INTERVAL, least=1), header.array(key)
    if recurs is None:
        return tuple((layer + 1) % period == 0 for layer in values.layers)
    if len(recurs) < len(values.layers):
        raise header.wrong(key, f"a list of true or false for each of {len(values.layers)} layers")
    return tuple(not recurs[layer] for layer in values.layers)


def attention_to_gguf(values: Writing) -> dict[str, Any]:
    if values["recurrent.key_size"] != values["recurrent.value_size"]:
        raise values.refusal("gated delta nets whose keys and values differ in size")
    recurs = np.array(values["layers.recurrent"])
    return {"attention.recurrent_layers": recurs, "full_attention_interval": INTERVAL}


def written_kinds(values: Writing) -> dict[str, list[str]]:
    return {TYPES: [FULL if attends else "linear_attention" for attends in values["layers.attention"]]}


NETWORK = {"qk_norm": True, "attention_gate": True, "recurrent.kind": "delta"}
DELTA = (
    *HEADS,
    EITHER,
    Field(
        "layers.attention",
        hf=Form(attention_from_hf, written_kinds),
        gguf=Form(attention_from_gguf, attention_to_gguf),
    ),
    Field("recurrent.width", hf=Key("linear_conv_kernel_dim", default=4)),
    Field("recurrent.heads", hf=Key("linear_num_value_heads", default=32)),
    Field("recurrent.groups", hf=Key("linear_num_key_heads", default=16)),
    Field("recurrent.key_size", hf=Key("linear_key_head_dim", default=128)),
    Field("recurrent.value_size", hf=Key("linear_value_head_dim", default=128)),
    Field("ropes", hf=NESTED),
)
IMPLIED = {"layers.window": ()}
DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}
GATED_EXPERTS = (
    *EXPERTS,
    SPARSE_STEPS,
    Field("moe.renormalise", hf=Key("norm_topk_prob", default=True), gguf=ADDS_UP),
    Field("moe.shared_size", hf="shared_expert_intermediate_size", default=REQUIRED),
    Field("moe.shared_gate", default=True),
)
MLP_SIZE = Field("intermediate_size", hf=Key("intermediate_size", default=lambda v: v["moe.expert_size"]))


# -- stored forms -----------------------------------------------------------------------------------------------------
def queries_and_gates(config: ModelConfig, stored: str, gate: str) -> Joined:
    """Query and gate of each head follow each other in the stored projection."""
    rows = np.arange(2 * config.query_size).reshape(config.num_heads, 2, config.head_dim)
    return Joined(stored, ((stored, rows[:, 0].reshape(-1)), (gate, rows[:, 1].reshape(-1))))


def folder_form(config: ModelConfig) -> StoredForm:
    """In a folder the rows of a group of heads follow each other: q, k, v, z, and beta, a."""
    own = config.recurrent
    if own is None:
        return StoredForm()
    each = own.heads // own.groups
    inner = each * own.value_size
    rows = np.arange(2 * own.groups * (own.key_size + inner)).reshape(own.groups, -1)
    q, k, v, z = np.split(rows, np.cumsum([own.key_size, own.key_size, inner]), axis=1)
    qkv = np.concatenate([q.reshape(-1), k.reshape(-1), v.reshape(-1)])
    return StoredForm(
        joined=(
            queries_and_gates(config, "self_attn.q_proj", "self_attn.gate"),
            Joined(
                "linear_attn.in_proj_qkvz",
                (("linear_attn.in_proj_qkv", qkv), ("linear_attn.in_proj_z", z.reshape(-1))),
            ),
            Joined("linear_attn.in_proj_ba", scalars_by_group(own, "linear_attn.in_proj_b", "linear_attn.in_proj_a")),
        )
    )


def scalars_by_group(own: RecurrentConfig, beta: str, decay: str) -> tuple[tuple[str, Rows], ...]:
    rows = np.arange(2 * own.heads).reshape(own.groups, 2, -1)
    return ((beta, rows[:, 0].reshape(-1)), (decay, rows[:, 1].reshape(-1)))


def gguf_form(config: ModelConfig) -> StoredForm:
    own = config.recurrent
    if own is None:
        return StoredForm()
    joined = (
        queries_and_gates(config, "attn_q", "query_gate"),
        Joined("ssm_ba", scalars_by_group(own, "ssm_beta", "ssm_alpha")),
    )
    return StoredForm(joined, flat=("ffn_gate_inp_shexp.weight",))


FAMILY = Family(
    name="qwen3next",
    network=NETWORK,
    fields=(*DELTA, *GATED_EXPERTS, MLP_SIZE),
    hf_types=("qwen3_next",),
    hf_class="Qwen3NextForCausalLM",
    hf_defaults=DEFAULTS,
    hf_implied=IMPLIED,
    hf_always=("attention_bias",),
    hf_names=HF_NAMES,
    norm_offset=NORM_OFFSET,
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("qwen3next",),
    gguf_names=GGUF_NAMES,
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
    hf_next_token=QWEN_NEXT_TOKEN,
    gguf_next_token=GGUF_QWEN_NEXT_TOKEN,
)
