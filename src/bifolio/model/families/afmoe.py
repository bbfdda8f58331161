"""AFMoE (Arcee Trinity): sigmoid routing with a bias, gates on the values of attention, norms around each part.

Three of four layers have a window and rope, the fourth has neither. Embeddings are multiplied by √hidden size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import ADD_UP, OWN_EXPERTS, SIGMOID_EXPERTS, leading, of_expert_size
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.window_fields import (
    BY_TYPE,
    LOCAL_POSITIONS,
    TYPES,
    Windows,
    of_layers,
)

SCALED, EVERY = "mup_enabled", "global_attn_every_n_layers"


def full_scale(values: Reading | Writing) -> float:
    return math.sqrt(values["hidden_size"])


def is_scaled(values: Writing) -> bool:
    scale = values["embedding_scale"]
    if not (scale == 1.0 or math.isclose(scale, full_scale(values), rel_tol=1e-6)):
        raise values.refusal(f"embedding_scale = {scale}")
    return bool(scale != 1.0)


def check_scaled(values: Writing) -> dict[str, Any]:
    if not is_scaled(values):
        raise values.refusal("embeddings that are not multiplied by the root of their size")
    return {}


def windows(values: Reading) -> Windows:
    if values.json.get(TYPES) is not None:
        found: Windows = BY_TYPE.read(values)
        return found
    every = values.json.count(EVERY, 4)
    return of_layers(values, [(layer + 1) % every != 0 for layer in values.layers])


FAMILY = Family(
    name="afmoe",
    network={"qk_norm": True, "post_norms": True, "attention_gate": True},
    fields=(
        *SIGMOID_EXPERTS,
        OWN_EXPERTS,
        ADD_UP,
        Field("moe.scale", hf="route_scale"),
        Field("moe.num_groups", hf=None),
        Field("moe.top_groups", hf=None),
        Field("moe.shared_size", hf=of_expert_size("num_shared_experts")),
        Field("layers.dense", hf=leading("num_dense_layers", 1)),
        Field("layers.window", hf=Form(windows, BY_TYPE.write)),
        LOCAL_POSITIONS,
        Field(
            "embedding_scale",
            hf=Form(
                lambda v: full_scale(v) if v.json.flag(SCALED, False) else 1.0, lambda v: {SCALED: is_scaled(v)}
            ),
            gguf=Form(full_scale, check_scaled),
        ),
    ),
    window_period=4,
    hf_types=("afmoe",),
    hf_class="AfmoeForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 6,
                 "num_shared_experts": 2, "moe_intermediate_size": 1408, "sliding_window": 1024},
    hf_implied={"qkv_bias": False, "output_bias": False, "mlp_bias": False},
    hf_needed={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    hf_refused={"attention_bias": "AFMoE with biases in attention is not supported"},
    hf_names=replace(
        HF_LLAMA,
        post_attention_norm="post_attention_layernorm",
        mlp_norm="pre_mlp_layernorm",
        post_mlp_norm="post_mlp_layernorm",
        gate="self_attn.gate_proj",
        router="mlp.router.gate",
        selection_bias="mlp.expert_bias",
    ),
    gguf_architectures=("afmoe",),
    gguf_names=replace(GGUF_LLAMA, gate="attn_gate"),
)  # fmt: skip
