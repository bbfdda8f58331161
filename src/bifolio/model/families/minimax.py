"""MiniMax-Text-01 and MiniMax-M1: lightning attention, experts, and norms that replace the residual stream."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Values, Writing
from bifolio.model.expert_fields import ADD_UP, EXPERTS, LOCAL_EXPERTS, WIDE
from bifolio.model.families.family import Family
from bifolio.model.families.minimax_m2 import ropes, write_ropes
from bifolio.model.fields import Field, Form
from bifolio.model.recurrent_fields import EITHER
from bifolio.model.recurrent_tensors import RecurrentNames
from bifolio.model.stored_form import Joined, StoredForm, reading, writing
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.window_fields import FULL, TYPES, named_kinds

LIGHTNING, NUMBERS = "linear_attention", "attn_type_list"
INTERVAL = 8  # every eighth layer has attention in GGUF files without an entry
NORM_EPS = 1e-6  # of the norms behind lightning attention, whatever that of the other norms is
FACTORS = {  # of the norms (alpha) and of the outputs (beta), in folders of transformers and in those of MiniMax
    f"{new}_{kind}_factor": f"layernorm_{old}_{kind}"
    for new, old in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
    for kind in ("alpha", "beta")
}
PARTS = ("lightning_query", "lightning_key", "lightning_value")


def read_factor(values: Reading) -> float:
    """The factor of the norms, which is the same behind all kinds of layers."""
    json = values.json
    found = {new: json.number(new, json.number(old, 1.0)) for new, old in FACTORS.items()}
    alpha = found["full_attn_alpha_factor"]
    for name, factor in found.items():
        needed = alpha if "alpha" in name else 1.0
        if factor != needed or factor <= 0:
            key = name if json.get(name) is not None else FACTORS[name]
            raise UnsupportedModelError(f"{json.path}: {key} is {factor}: supported are equal alpha > 0, and beta = 1")
    return alpha


def write_factor(values: Writing) -> dict[str, float]:
    return {name: values["kept_norms"] if "alpha" in name else 1.0 for name in FACTORS}


def factor_from_gguf(values: Reading) -> float:
    factor = values.header.number(".residual_scale")
    if not 0 < factor < math.inf:
        raise values.header.wrong(".residual_scale", "a positive number")
    return factor


def factor_to_gguf(values: Writing) -> dict[str, float]:
    return {"residual_scale": values["kept_norms"]}


def attention_from_hf(values: Reading) -> tuple[bool, ...]:
    """By name, by number, or in every second layer."""
    if values.json.get(TYPES) is None and values.json.get(NUMBERS) is None:
        return tuple(layer % 2 == 0 for layer in values.layers)
    if values.json.get(TYPES) is None:
        numbers = values.json.counts(NUMBERS, least=0)
        if len(numbers) != len(values.layers) or not set(numbers) <= {0, 1}:
            raise values.json.wrong(NUMBERS, f"a list of 0 or 1 for each of {len(values.layers)} layers")
        return tuple(number == 1 for number in numbers)
    kinds = named_kinds(values)
    for kind in kinds:
        if kind not in (FULL, LIGHTNING):
            raise UnsupportedModelError(f"{values.json.path}: layers of the kind {kind!r} ({TYPES}) are not supported")
    return tuple(kind == FULL for kind in kinds)


def attention_to_hf(values: Writing) -> dict[str, list[str]]:
    return {TYPES: [FULL if attends else LIGHTNING for attends in values["layers.attention"]]}


def attention_from_gguf(values: Reading) -> tuple[bool, ...]:
    header, key = values.header, ".attention.recurrent_layers"
    period, recurs = header.count(".full_attention_interval", INTERVAL, least=1), header.array(key)
    if recurs is None:
        return tuple((layer + 1) % period == 0 for layer in values.layers)
    if len(recurs) < len(values.layers):
        raise header.wrong(key, f"a list of true or false for each of {len(values.layers)} layers")
    return tuple(not recurs[layer] for layer in values.layers)


def attention_to_gguf(values: Writing) -> dict[str, Any]:
    return {"attention.recurrent_layers": np.array(values["layers.recurrent"]), "full_attention_interval": INTERVAL}


def channels(values: Values) -> int:
    return 3 * int(values["num_heads"]) * int(values["head_dim"])


def by_head(config: ModelConfig, stored: str) -> StoredForm:
    """Query, key and value of each head follow each other."""
    rows = np.arange(3 * config.query_size).reshape(config.num_heads, 3, config.head_dim)
    prefix = stored.rpartition(".")[0]
    names = (f"{prefix}.{part}" if prefix else part for part in PARTS)
    return StoredForm(joined=(Joined(stored, tuple((name, rows[:, n].reshape(-1)) for n, name in enumerate(names))),))


def folder_form(config: ModelConfig) -> StoredForm:
    return by_head(config, "self_attn.qkv_proj")


def gguf_form(config: ModelConfig) -> StoredForm:
    return by_head(config, "attn_qkv")


def lightning_names(gate: str, prefix: str, output: str, norm: str) -> RecurrentNames:
    query, key, value = (prefix + part for part in PARTS)
    return RecurrentNames(((gate, 1), (value, 1), (key, 1), (query, 1)), conv="", output=output, norm=norm)


FAMILY = Family(
    name="minimax",
    network={"qkv_bias": False, "output_bias": False, "mlp_bias": False, "layers.window": (), "recurrent.width": 1,
             "recurrent.kind": "lightning", "recurrent.norm_eps": NORM_EPS},
    fields=(
        *EXPERTS,
        LOCAL_EXPERTS,
        WIDE,
        ADD_UP,
        EITHER,
        Field("kept_norms", hf=Form(read_factor, write_factor), gguf=Form(factor_from_gguf, factor_to_gguf)),
        Field("layers.attention", hf=Form(attention_from_hf, attention_to_hf),
              gguf=Form(attention_from_gguf, attention_to_gguf)),
        Field("ropes", hf=Form(ropes, write_ropes)),
        Field("recurrent.heads", default=lambda v: v["num_heads"]),
        Field("recurrent.groups", default=lambda v: v["num_heads"]),
        Field("recurrent.key_size", default=lambda v: v["head_dim"]),
        Field("recurrent.value_size", default=lambda v: v["head_dim"]),
        Field("recurrent.channels", default=channels),
    ),
    hf_types=("minimax", "minimax_text_01", "minimax_m1"),
    hf_class="MiniMaxForCausalLM",
    hf_modules={"mlp.": "block_sparse_moe."},
    hf_defaults={"num_key_value_heads": 8, "num_experts_per_tok": 2, "num_local_experts": 8, "rope_theta": 1000000.0,
                 "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2},
    hf_needed={"postnorm": True, "hidden_act": "silu"},
    hf_refused={"sliding_window": "MiniMax-01 with windows is not supported",
                "shared_intermediate_size": "MiniMax-01 with shared experts is not supported"},
    hf_names=replace(
        HF_LLAMA,
        router="block_sparse_moe.gate",
        expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
        recurrent=lightning_names("self_attn.output_gate", "self_attn.", "self_attn.out_proj", "self_attn.norm"),
    ),
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("minimax-01",),
    gguf_names=replace(GGUF_LLAMA, recurrent=lightning_names("attn_gate", "", "attn_output", "attn_norm_2")),
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
)  # fmt: skip
