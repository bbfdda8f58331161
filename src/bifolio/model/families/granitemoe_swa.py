"""Granite with windows, and experts in place of the MLPs, with or without a shared MLP beside them.

GGUF files are those of bifolio alone.
"""

from __future__ import annotations

from dataclasses import replace

from bifolio.config import ModelConfig
from bifolio.model.expert_fields import ADD_UP, EXPERTS, LOCAL_EXPERTS, WIDE
from bifolio.model.families import granite_swa
from bifolio.model.families.family import Family
from bifolio.model.families.granitemoe import HF_NAMES
from bifolio.model.fields import Field, Key
from bifolio.model.stored_form import StoredForm, reading, writing

UP, DOWN = (f"block_sparse_moe.experts.{name}_proj" for name in ("gate_up", "down"))
FOLDER_FORM = StoredForm(renamed=((f"{UP}.weight", UP), (f"{DOWN}.weight", DOWN)))


def folder_form(config: ModelConfig) -> StoredForm:
    return FOLDER_FORM


FAMILY = Family(
    name="granitemoe_swa",
    network={"sinks": True},
    fields=(
        *EXPERTS,
        LOCAL_EXPERTS,
        WIDE,
        ADD_UP,
        *granite_swa.LAYERS,
        Field("moe.shared_size", hf=Key("shared_intermediate_size", default=0)),
    ),
    hf_types=("granitemoe_swa",),
    hf_class="GraniteMoeSWAForCausalLM",
    hf_defaults={**granite_swa.DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2, "bos_token_id": 1,
                 "eos_token_id": 2},
    hf_implied={"mlp_bias": False},
    hf_always=("attention_bias",),
    hf_names=replace(
        HF_NAMES, router="block_sparse_moe.router", expert_up=(UP,), expert_down=DOWN,
    ),
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("granitemoe-swa",),
)  # fmt: skip
