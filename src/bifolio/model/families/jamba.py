"""Jamba: selective recurrent layers (Mamba) with norms of their parameters, few layers with attention, experts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import AS_THEY_ARE, EXPERTS, OWN_EXPERTS, WIDE
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form, Key
from bifolio.model.recurrent_fields import EITHER, HEADS_BY_LAYER, SELECTIVE, selective_names
from bifolio.model.selective_tensors import SelectiveNames
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

NORMS = ("mamba.dt_layernorm", "mamba.b_layernorm", "mamba.c_layernorm")


def every(values: Reading, name: str, period: int, offset: int) -> tuple[bool, ...]:
    """The layers of a period and an offset."""
    step = values.json.count(f"{name}_layer_period", period)
    first = values.json.count(f"{name}_layer_offset", offset, least=0)
    return tuple(layer % step == first for layer in values.layers)


def period_of(values: Writing, name: str, chosen: tuple[bool, ...]) -> dict[str, Any]:
    numbers = [layer for layer in values.layers if chosen[layer]]
    if not numbers:
        raise values.refusal(f"no layers of the kind {name}")
    step = numbers[1] - numbers[0] if numbers[1:] else max(len(chosen), numbers[0] + 1)
    if any((layer % step == numbers[0] % step) != chosen[layer] for layer in values.layers):
        raise values.refusal(f"layers of the kind {name} at {numbers}")
    return {f"{name}_layer_period": step, f"{name}_layer_offset": numbers[0] % step}


def step_rank(values: Reading) -> int:
    found = values.json.get("mamba_dt_rank")
    return math.ceil(values["hidden_size"] / 16) if found in (None, "auto") else values.json.count("mamba_dt_rank")


def dense_from_gguf(values: Reading) -> tuple[bool, ...]:
    return tuple(not values.header.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") for layer in values.layers)


FAMILY = Family(
    name="jamba",
    network={"ropes": (), "layers.rope": (), "recurrent.step_norms": "weighted"},
    fields=(
        *EXPERTS,
        OWN_EXPERTS,
        WIDE,
        *SELECTIVE,
        *HEADS_BY_LAYER,
        EITHER,
        Field("moe.renormalise", hf=None, gguf=AS_THEY_ARE),
        Field("layers.attention",
              hf=Form(lambda v: every(v, "attn", 8, 4), lambda v: period_of(v, "attn", v["layers.attention"]))),
        Field("layers.dense",
              hf=Form(lambda v: tuple(not chosen for chosen in every(v, "expert", 2, 1)),
                      lambda v: period_of(v, "expert", tuple(not dense for dense in v["layers.dense"]))),
              gguf=Form(dense_from_gguf)),
        Field("recurrent.step_rank", hf=Key("mamba_dt_rank", reader=step_rank)),
        Field("recurrent.step_norm_eps", default=lambda v: v["norm_eps"]),
        Field("max_position", hf=Key("max_position_embeddings", default=262144)),
    ),
    hf_types=("jamba",),
    hf_class="JambaForCausalLM",
    hf_defaults={"num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2, "bos_token_id": 1,
                 "eos_token_id": 2},
    hf_implied={"qkv_bias": False, "output_bias": False, "mlp_bias": False, "layers.window": ()},
    hf_refused={"mamba_proj_bias": "Jamba with biases of its Mamba projections is not supported"},
    hf_names=replace(
        HF_LLAMA,
        mlp_norm="pre_ff_layernorm",
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        expert_up=("feed_forward.experts.{}.gate_proj", "feed_forward.experts.{}.up_proj"),
        expert_down="feed_forward.experts.{}.down_proj",
        final_norm="model.final_layernorm",
        recurrent=replace(selective_names("mamba"), selective=SelectiveNames("mamba.x_proj", "mamba.dt_proj", NORMS)),
    ),
    gguf_architectures=("jamba",),
    gguf_names=replace(
        GGUF_LLAMA,
        recurrent=replace(
            selective_names(), selective=SelectiveNames("ssm_x", "ssm_dt", ("ssm_dt_norm", "ssm_b_norm", "ssm_c_norm"))
        ),
    ),
)  # fmt: skip
