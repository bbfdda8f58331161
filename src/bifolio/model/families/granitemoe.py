"""Granite 3 with experts in place of the MLPs; `granitemoeshared` has a shared MLP beside them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import ADD_UP, EXPERTS, LOCAL_EXPERTS, WIDE
from bifolio.model.families.family import Family
from bifolio.model.families.granite import SCALES
from bifolio.model.fields import Field, Form
from bifolio.model.tensor_names import HF_LLAMA

SHARED, SIZE = "granitemoeshared", "shared_intermediate_size"
HF_NAMES = replace(
    HF_LLAMA,
    shared_up=("shared_mlp.input_linear",),
    shared_down="shared_mlp.output_linear",
    router="block_sparse_moe.router.layer",
    expert_up=("block_sparse_moe.input_linear",),
    expert_down="block_sparse_moe.output_linear",
)


def read_shared(values: Reading) -> int:
    return values.json.count(SIZE, 0, least=0) if values.json.get("model_type") == SHARED else 0


def write_shared(values: Writing) -> dict[str, Any]:
    names = {"architectures": ["GraniteMoeSharedForCausalLM"], "model_type": SHARED}
    return {**names, SIZE: values["moe.shared_size"]} if values["moe.shared_size"] else {}


SHARED_MLP = Field("moe.shared_size", hf=Form(read_shared, write_shared))
FAMILY = Family(
    name="granitemoe",
    fields=(
        *EXPERTS,
        LOCAL_EXPERTS,
        WIDE,
        ADD_UP,
        *SCALES,
        SHARED_MLP,
    ),
    hf_types=("granitemoe", SHARED),
    hf_class="GraniteMoeForCausalLM",
    hf_defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2},
    hf_implied={"mlp_bias": False, "layers.window": ()},
    hf_always=("attention_bias",),
    hf_written={"mlp_bias": False},
    hf_names=HF_NAMES,
    gguf_architectures=("granitemoe",),
    gguf_interleaved=True,
)
