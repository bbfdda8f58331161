"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts beside a gated shared MLP.

Layers behind the last one (`mtp`, `nextn`) are heads for multi-token prediction (`model.next_token_head`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, MoeConfig, RecurrentConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.gguf.recurrent_entries import recurrent_entries, recurrent_from_gguf
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    expert_count,
    kinds_of_layers,
    nested_rope,
)
from bifolio.model.next_token_names import GGUF_QWEN_NEXT_TOKEN, QWEN_NEXT_TOKEN
from bifolio.model.recurrent_tensors import RecurrentNames
from bifolio.model.stored_form import Joined, Rows, StoredForm, reading, writing
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

NORM_OFFSET = 1.0
INTERVAL = 4  # one layer of so many has attention
ROTATED = 0.25  # part of a head
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


# -- folders ----------------------------------------------------------------------------------------------------------
def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    return delta_from_hf(raw, name, moe=experts_from_hf(raw))


def delta_from_hf(raw: Raw, name: str, moe: MoeConfig | None = None) -> ModelConfig:
    """The fields of all models with gated delta nets."""
    kinds = kinds_of_layers(raw, raw["layer_types"]) if raw.get("layer_types") else []
    period = int(raw.get("full_attention_interval") or INTERVAL)
    layers = range(int(raw["num_hidden_layers"]))
    attention = [n for n in layers if (kinds[n] == "full_attention" if kinds else (n + 1) % period == 0)]
    heads, groups = int(raw.get("linear_num_value_heads", 32)), int(raw.get("linear_num_key_heads", 16))
    key_size, value_size = int(raw.get("linear_key_head_dim", 128)), int(raw.get("linear_value_head_dim", 128))
    recurrent = RecurrentConfig(
        "delta",
        layers=tuple(layer for layer in layers if layer not in attention),
        attention_layers=tuple(attention),
        width=int(raw.get("linear_conv_kernel_dim", 4)),
        channels=heads * value_size + 2 * groups * key_size,
        heads=heads,
        groups=groups,
        key_size=key_size,
        value_size=value_size,
    )
    defaults: dict[str, Any] = {"head_dim": 256, "partial_rotary_factor": ROTATED}
    if moe is not None:
        defaults["intermediate_size"] = moe.expert_size
    return decoder_from_hf(
        {**defaults, **raw},
        name,
        norm_offset=NORM_OFFSET,
        qk_norm=True,
        attention_gate=True,
        layer_window=(),
        recurrent=recurrent,
        moe=moe,
    )


def experts_from_hf(raw: Raw) -> MoeConfig:
    step, plain = int(raw.get("decoder_sparse_step", 1)), raw.get("mlp_only_layers") or []
    layers = range(int(raw["num_hidden_layers"]))
    return MoeConfig(
        num_experts=expert_count(raw),
        top_k=int(raw["num_experts_per_tok"]),
        expert_size=int(raw["moe_intermediate_size"]),
        renormalise=bool(raw.get("norm_topk_prob", True)),
        shared_size=int(raw["shared_expert_intermediate_size"]),
        shared_gate=True,
        dense_layers=tuple(layer for layer in layers if layer in plain or (layer + 1) % step),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return delta_to_hf(config) | experts_to_hf(config)


def delta_to_hf(config: ModelConfig) -> dict[str, Any]:
    own = config.recurrent
    if own is None or not config.attention_gate:
        raise UnsupportedModelError("a folder of this family describes gated delta nets and gated attention")
    return {
        **nested_rope(config, decoder_to_hf(config)),
        "attention_bias": config.qkv_bias,
        "layer_types": [
            "linear_attention" if layer in own.layers else "full_attention" for layer in range(config.num_layers)
        ],
        "linear_conv_kernel_dim": own.width,
        "linear_num_key_heads": own.groups,
        "linear_num_value_heads": own.heads,
        "linear_key_head_dim": own.key_size,
        "linear_value_head_dim": own.value_size,
    }


def experts_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    return {} if moe is None else {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_size,
        "shared_expert_intermediate_size": moe.shared_size,
        "norm_topk_prob": moe.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(moe.dense_layers),
    }  # fmt: skip


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


# -- GGUF files -------------------------------------------------------------------------------------------------------
def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    return delta_from_gguf(file, metadata, name, moe=gated_experts_from_gguf(file, metadata))


def gated_experts_from_gguf(file: GgufFile, metadata: Metadata) -> MoeConfig | None:
    """The architecture implies that the weights of the chosen experts add up to 1."""
    return experts_from_gguf(file, metadata, renormalise=True, shared_gate=True)


def delta_from_gguf(
    file: GgufFile, metadata: Metadata, name: str, moe: MoeConfig | None = None, *, tiled: bool = False
) -> ModelConfig:
    count = metadata.count(".block_count") - metadata.count(".nextn_predict_layers", 0)
    period = metadata.count(".full_attention_interval", INTERVAL)
    if not period:
        raise metadata.fail("the interval of layers with attention must not be 0")
    marked = metadata.array(".attention.recurrent_layers")
    if marked is not None and len(marked) < count:
        raise metadata.fail(f"{len(marked)} layers are marked as recurrent or not, of {count}")
    recurs = [bool(marked[n]) if marked is not None else (n + 1) % period != 0 for n in range(count)]
    layers = [layer for layer in range(count) if recurs[layer]]
    attention = [layer for layer in range(count) if not recurs[layer]]
    return decoder_from_gguf(
        file,
        metadata,
        name,
        num_layers=count,
        qk_norm=True,
        attention_gate=True,
        recurrent=recurrent_from_gguf(metadata, "delta", layers, attention, tiled=tiled),
        moe=moe,
    )


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    if config.moe is not None and not config.moe.renormalise:
        raise UnsupportedModelError("GGUF cannot describe a model of this family whose experts do not add up to 1")
    return delta_entries(config)


def delta_entries(config: ModelConfig) -> dict[str, Value]:
    own = config.recurrent
    if own is None or own.key_size != own.value_size:
        raise UnsupportedModelError("GGUF describes gated delta nets with keys and values of one size only")
    recurs = np.array([layer in own.layers for layer in range(config.num_layers)])
    return {**recurrent_entries(config), "attention.recurrent_layers": recurs, "full_attention_interval": INTERVAL}


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
    hf_types=("qwen3_next",),
    hf_class="Qwen3NextForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=HF_NAMES,
    norm_offset=NORM_OFFSET,
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("qwen3next",),
    written_as="qwen3next",
    config_from_gguf=config_from_gguf,
    gguf_names=GGUF_NAMES,
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
    gguf_entries=gguf_entries,
    hf_next_token=QWEN_NEXT_TOKEN,
    gguf_next_token=GGUF_QWEN_NEXT_TOKEN,
)
