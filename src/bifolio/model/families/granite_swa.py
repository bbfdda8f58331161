"""Granite with windows, dense or with experts: sinks, a window on three of four layers, and a base of rope for each.

GGUF files name one base, and the layers without rope.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import ADD_UP, EXPERTS, WIDE
from bifolio.model.families.cwm import windows
from bifolio.model.families.family import Family
from bifolio.model.families.granite import SCALES
from bifolio.model.families.granitemoe import HF_NAMES
from bifolio.model.fields import Field, Form, Key
from bifolio.model.huggingface.rope_fields import read_rope, rope_parameters, written_ropes
from bifolio.model.model_file import TensorSource
from bifolio.model.stored_form import StoredForm, writing
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.window_fields import BY_TYPE

DENSE, SPARSE = "granite_swa", "granitemoe_swa"
THETAS, PATTERN = "layer_rope_theta", "attention.rope_pattern"  # 0 and false: the layer has no rope
COUNT, SHARED = "num_local_experts", "shared_intermediate_size"
UP, DOWN = (f"block_sparse_moe.experts.{name}_proj" for name in ("gate_up", "down"))
FORM = StoredForm(renamed=((f"{UP}.weight", UP), (f"{DOWN}.weight", DOWN)))
GRANITE_FORM = StoredForm(
    renamed=(
        (f"{UP}.weight", f"{HF_NAMES.expert_up[0]}.weight"),
        (f"{DOWN}.weight", f"{HF_NAMES.expert_down}.weight"),
        ("block_sparse_moe.router.weight", f"{HF_NAMES.router}.weight"),
    )
)


# -- ropes ------------------------------------------------------------------------------------------------------------
def thetas(values: Reading) -> tuple[float, ...]:
    """The base of the rope of each layer."""
    if values.json.get(THETAS) is None:
        return (read_rope(values, rope_parameters(values), values["head_dim"]).theta,) * len(values.layers)
    found = values.json.numbers(THETAS)
    if len(found) != len(values.layers) or min(found) < 0:
        raise values.json.wrong(THETAS, f"a list of {len(values.layers)} numbers that are not negative")
    return found


def ropes(values: Reading) -> tuple[RopeConfig, ...]:
    own = rope_parameters(values)
    different = sorted(set(thetas(values)) - {0.0})
    return tuple(read_rope(values, own.with_values({"rope_theta": theta}), values["head_dim"]) for theta in different)


def layer_ropes(values: Reading) -> tuple[int | None, ...]:
    found = thetas(values)
    different = sorted(set(found) - {0.0})
    return tuple(different.index(theta) if theta else None for theta in found)


def written_thetas(values: Writing) -> dict[str, list[float]]:
    return {THETAS: [0.0 if rope is None else values.config.ropes[rope].theta for rope in values["layers.rope"]]}


def layer_ropes_from_gguf(values: Reading) -> tuple[int | None, ...]:
    pattern = values.header.array("." + PATTERN)
    if pattern is None:
        return ()
    if len(pattern) != len(values.layers):
        raise values.header.wrong("." + PATTERN, f"a list for {len(values.layers)} layers, not for {len(pattern)},")
    return tuple(0 if has_rope else None for has_rope in pattern.tolist())


def rope_pattern(values: Writing) -> dict[str, Any]:
    if len(values.config.ropes) > 1:
        raise values.refusal("several bases of rope")
    return {PATTERN: np.array([rope is not None for rope in values["layers.rope"]])}


# -- experts ----------------------------------------------------------------------------------------------------------
def experts_from_hf(values: Reading) -> int:
    return values.json.count(COUNT, 8) if values.json.get("model_type") == SPARSE else 0


def experts_to_hf(values: Writing) -> dict[str, Any]:
    moe = values.config.moe
    if moe is None:
        return {}
    names = {"architectures": ["GraniteMoeSWAForCausalLM"], "model_type": SPARSE}
    return {**names, COUNT: moe.num_experts, SHARED: moe.shared_size}


def folder_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    """Experts under the names of the class of transformers, or under those of Granite 3."""
    is_granite = source.has(f"model.layers.0.{HF_NAMES.expert_up[0]}.weight")
    return (GRANITE_FORM if is_granite else FORM).source(source)


def folder_form(config: ModelConfig) -> StoredForm:
    return FORM


FAMILY = Family(
    name="granite_swa",
    network={"sinks": True},
    fields=(
        *EXPERTS,
        WIDE,
        ADD_UP,
        *SCALES,
        Field("layers.window", hf=Form(windows, BY_TYPE.write)),
        Field("ropes", hf=Form(ropes, written_ropes)),
        Field(
            "layers.rope",
            hf=Form(layer_ropes, written_thetas),
            gguf=Form(layer_ropes_from_gguf, rope_pattern),
        ),
        Field(
            "moe.num_experts",
            hf=Form(experts_from_hf, experts_to_hf),
            gguf=Key("expert_count", default=0),
        ),
        Field("moe.top_k", hf=Key("num_experts_per_tok", default=2)),
        Field(
            "moe.shared_size",
            hf=Form(lambda v: v.json.count(SHARED, 0, least=0)),
            gguf=Key("expert_shared_feed_forward_length", optional=True),
        ),
    ),
    hf_types=(DENSE, SPARSE),
    hf_class="GraniteSWAForCausalLM",
    hf_type_defaults={
        DENSE: {"sliding_window": 128, "rms_norm_eps": 1e-5, "num_key_value_heads": 4,
                "max_position_embeddings": 8192, "tie_word_embeddings": True, "bos_token_id": 100257,
                "eos_token_id": 100257},
        SPARSE: {"sliding_window": 128, "bos_token_id": 1, "eos_token_id": 2},
    },
    hf_always=("attention_bias", "mlp_bias", "tie_word_embeddings"),
    hf_names=replace(
        HF_NAMES, up=HF_LLAMA.up, down=HF_LLAMA.down, router="block_sparse_moe.router", expert_up=(UP,),
        expert_down=DOWN,
    ),
    folder_source=folder_source,
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("granite_swa",),
    gguf_interleaved=True,
    gguf_names=replace(GGUF_LLAMA, expert_up=("ffn_gate_up_exps",), shared_up=("ffn_up_shexp",)),
)  # fmt: skip
