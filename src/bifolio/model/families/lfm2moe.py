"""LFM2 with experts in place of the MLPs, such as LFM2-8B-A1B."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.model.decoder_fields import in_tensors
from bifolio.model.description import Writing
from bifolio.model.expert_fields import ADDS_UP, EXPERTS, leading
from bifolio.model.families import lfm2
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form, Key


def check_bias(values: Writing) -> dict[str, Any]:
    if not values["moe.selection_bias"]:
        raise values.refusal("experts that are chosen without a bias")
    return {}


FAMILY = Family(
    name="lfm2moe",
    network={"qk_norm": True},
    fields=(
        *lfm2.CONVOLUTIONS,
        *EXPERTS,
        Field("moe.scoring", default="sigmoid"),
        Field("moe.renormalise", hf=Key("norm_topk_prob", default=True), gguf=ADDS_UP),
        Field("moe.scale", hf="routed_scaling_factor"),
        Field(
            "moe.selection_bias",
            hf=Key("use_expert_bias", default=True),
            gguf=Form(in_tensors("exp_probs_b.bias").read, check_bias),
        ),
        Field("layers.dense", hf=leading("num_dense_layers", 2)),
    ),
    hf_types=("lfm2_moe",),
    hf_class="Lfm2MoeForCausalLM",
    hf_defaults={**lfm2.DEFAULTS, "num_experts_per_tok": 4},
    hf_names=replace(
        lfm2.HF_NAMES,
        router="feed_forward.gate",
        selection_bias="feed_forward.expert_bias",
        expert_up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
        expert_down="feed_forward.experts.{}.w2",
    ),
    gguf_architectures=("lfm2moe",),
    gguf_names=lfm2.GGUF_NAMES,
)
