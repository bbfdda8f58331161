"""Granite 4 (hybrid): Mamba-2 layers, attention without positions in a few, an MLP or experts beside a shared MLP.

Folders whose layers all have attention are read, too; they have rope. GGUF files of Bamba have this architecture, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import ADD_UP, EXPERTS, WIDE
from bifolio.model.families.family import Family
from bifolio.model.families.granite import SCALES
from bifolio.model.families.granitemoe import HF_NAMES
from bifolio.model.fields import Field, Form, Key
from bifolio.model.gguf.rope_fields import read_rope, rope_entries
from bifolio.model.huggingface.rope_fields import read_ropes, written_ropes
from bifolio.model.recurrent_fields import EITHER, GGUF_MAMBA, HEADS_BY_LAYER, MAMBA, mamba_names
from bifolio.model.tensor_names import GGUF_LLAMA
from bifolio.model.window_fields import TYPES, named_kinds

ATTENTION = ("attention", "full_attention")  # as old and new folders name it
SIZE, SHARED, POSITIONS = "intermediate_size", "shared_intermediate_size", "position_embedding_type"
FINETUNED = "rope.scaling.finetuned"  # in GGUF files: there is rope
LAYERS = (*MAMBA, *HEADS_BY_LAYER, EITHER)
ROPES = Field(
    "ropes",
    gguf=Form(
        lambda v: (read_rope(v),) if v.header.flag(f".{FINETUNED}", True) else (),
        lambda v: {**rope_entries(v), FINETUNED: bool(v.config.ropes)},
    ),
)


def attention_layers(values: Reading) -> tuple[bool, ...]:
    key = next((key for key in (TYPES, "layers_block_type") if values.json.get(key)), None)
    return tuple(kind in ATTENTION for kind in named_kinds(values, key)) if key else (False,) * len(values.layers)


def written_kinds(values: Writing) -> dict[str, list[str]]:
    return {TYPES: ["attention" if attends else "mamba" for attends in values["layers.attention"]]}


def ropes(values: Reading) -> tuple[RopeConfig, ...]:
    if values.json.text(POSITIONS, "") == "rope":
        return read_ropes(values)
    if not values["recurrent.kind"]:
        raise UnsupportedModelError("a Granite model without recurrent layers and without positions is not supported")
    return ()


def mlp_size(values: Reading) -> int:
    """The width of the MLPs or of the experts."""
    return values.json.count(SIZE) if values["moe.num_experts"] else values.json.count(SHARED, 1024)


def write_sizes(values: Writing) -> dict[str, int]:
    size, moe = values[SIZE], values.config.moe
    return {SIZE: size if moe is None else moe.expert_size, SHARED: size if moe is None else moe.shared_size}


def write_experts(values: Writing) -> dict[str, Any]:
    moe = values.config.moe
    count, chosen = (0, 0) if moe is None else (moe.num_experts, moe.top_k)
    return {"num_local_experts": count, "num_experts_per_tok": chosen}


def folder_family(config: ModelConfig) -> str:
    """Heads that are rotated in part are those of Bamba."""
    return "bamba" if any(rope.rotary_dim < config.head_dim for rope in config.ropes) else config.architecture


FAMILY = Family(
    name="granitehybrid",
    fields=(
        *SCALES,
        *EXPERTS,
        WIDE,
        ADD_UP,
        *LAYERS,
        ROPES,
        Field("ropes", hf=Form(ropes, lambda v: {**written_ropes(v), POSITIONS: "rope" if v.config.ropes else None})),
        Field("layers.attention", hf=Form(attention_layers, written_kinds)),
        Field("recurrent.kind", hf=Form(lambda v: "mamba" if any(v["layers.recurrent"]) else "")),
        Field("intermediate_size", hf=Form(mlp_size, write_sizes)),
        Field(
            "moe.num_experts",
            hf=Form(lambda v: v.json.count("num_local_experts", 0, least=0), write_experts),
            gguf=Key("expert_count", default=0),
        ),
        Field("moe.shared_size", hf=Form(lambda v: v.json.count(SHARED, 1024))),
    ),
    hf_types=("granitemoehybrid",),
    hf_class="GraniteMoeHybridForCausalLM",
    hf_always=("attention_bias",),
    hf_names=replace(
        HF_NAMES,
        up=HF_NAMES.shared_up,
        down=HF_NAMES.shared_down,
        recurrent=mamba_names("mamba"),
    ),
    folder_family=folder_family,
    gguf_architectures=("granitehybrid",),
    gguf_names=replace(GGUF_LLAMA, recurrent=GGUF_MAMBA),
    gguf_interleaved=True,
)
