"""LFM3: LFM2 with wider convolutions, windows in some of the layers with attention, and a gate on each of their heads.

Layers with and without a window have a rope each. Outputs of convolutions, attention and MLPs are normed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.decoder_fields import in_tensors
from bifolio.model.description import Reading, Writing
from bifolio.model.families import lfm2
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.gguf.rope_fields import local_rope, rope_entries
from bifolio.model.gguf.rope_fields import read_rope as gguf_rope
from bifolio.model.huggingface.json_object import JsonObject
from bifolio.model.huggingface.rope_fields import PARAMETERS, SCALING, read_rope, rope_object
from bifolio.model.model_file import TensorSource
from bifolio.model.stored_form import StoredForm
from bifolio.model.window_fields import FULL, LOCAL, TYPES, Windows, largest_window, named_kinds, of_layers, window_size

CONV = "conv"
GATE, OWN_GATE = "self_attn.gate_proj", "self_attn.g_proj"
ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": lfm2.THETA, "partial_rotary_factor": 0.5},
}
DEFAULTS = {**lfm2.DEFAULTS, "conv_L_cache": 7, "head_dim": 128, "num_key_value_heads": 4, "sliding_window": 256,
            "use_sandwich_norm": True, "use_attention_gate": True, "bos_token_id": 124894,
            "eos_token_id": 124900}  # fmt: skip


# -- folders ----------------------------------------------------------------------------------------------------------
def layer_kinds(values: Reading) -> tuple[str, ...]:
    if values.json.get(TYPES) is None:
        return tuple(FULL if n % 4 == 2 else LOCAL if n % 4 == 0 and n else CONV for n in values.layers)
    kinds = named_kinds(values)
    for kind in kinds:
        if kind not in (CONV, FULL, LOCAL):
            raise UnsupportedModelError(f"LFM3 layers of the kind {kind!r} are not supported")
    return kinds


def windows(values: Reading) -> Windows:
    has_window = [kind == LOCAL for kind in layer_kinds(values)]
    if any(has_window) and not window_size(values):
        raise UnsupportedModelError("an LFM3 model with sliding attention must say how long its window is")
    return of_layers(values, has_window)


def ropes(values: Reading) -> tuple[RopeConfig, ...]:
    """One for layers without and one for layers with a window, if there are such layers."""
    own = values.json.object(SCALING) or values.json.object(PARAMETERS)
    own = own or own.with_values(ROPES)
    return tuple(rope_of(values, own, kind) for kind in (FULL, LOCAL) if kind in layer_kinds(values))


def rope_of(values: Reading, parameters: JsonObject, kind: str) -> RopeConfig:
    """Proportional, or the plain one of whole heads."""
    own = parameters.needed_object(kind)
    scaling = own.text("rope_type", own.text("type", "default"))
    if scaling not in ("default", "proportional"):
        raise UnsupportedModelError(f"rope scaling {scaling!r} is not supported in LFM3; supported: proportional")
    own = own if scaling == "proportional" else own.with_values({"partial_rotary_factor": 1.0})
    return read_rope(values, own, values["head_dim"])


def write_kinds(values: Writing) -> dict[str, Any]:
    both = zip(values["layers.attention"], values["layers.window"], strict=True)
    return {TYPES: [CONV if not attends else LOCAL if window else FULL for attends, window in both]}


def write_ropes(values: Writing) -> dict[str, Any]:
    kinds, indices = write_kinds(values)[TYPES], values["layers.rope"]
    found = {kinds[n]: values.config.ropes[indices[n] or 0] for n in values.layers if kinds[n] != CONV}
    return {PARAMETERS: {kind: rope_object(rope) for kind, rope in found.items()}}


def folder_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    """Gates under the name that folders have, or that of the class of transformers."""
    layer = config.attention_layers[0]
    if not source.has(f"model.layers.{layer}.{OWN_GATE}.weight"):
        return source
    return StoredForm(renamed=((f"{GATE}.weight", f"{OWN_GATE}.weight"),)).source(source)


# -- GGUF files -------------------------------------------------------------------------------------------------------
def ropes_from_gguf(values: Reading) -> tuple[RopeConfig, ...]:
    rope = gguf_rope(values)
    rope = replace(rope, scaling="proportional") if rope.frequency_factors else rope
    return (rope, local_rope(values, values["head_dim"])) if values.header.has(".rope.freq_base_swa") else (rope,)


def ropes_to_gguf(values: Writing) -> dict[str, Any]:
    if any(rope.frequency_factors for rope in values.config.ropes[1:]):
        raise values.refusal("a rope of divided frequencies in the layers with a window")
    return rope_entries(values)


FAMILY = Family(
    name="lfm3",
    network={"qk_norm": True},
    fields=(
        *lfm2.CONVOLUTIONS,
        Field("layers.attention", hf=Form(lambda v: tuple(kind != CONV for kind in layer_kinds(v)), write_kinds)),
        Field("layers.window", hf=Form(windows, lambda v: {"sliding_window": largest_window(v)})),
        Field(
            "layers.rope",
            hf=Form(lambda v: tuple(int(kind == LOCAL) for kind in layer_kinds(v)) if len(v["ropes"]) > 1 else ()),
        ),
        Field("ropes", hf=Form(ropes, write_ropes), gguf=Form(ropes_from_gguf, ropes_to_gguf)),
        Field("post_norms", hf="use_sandwich_norm", gguf=in_tensors("post_attention_norm.weight")),
        Field("attention_gate", hf="use_attention_gate", gguf=in_tensors("attn_gate.weight")),
        Field("gate_by_head", default=lambda v: v["attention_gate"]),
    ),
    hf_types=("lfm3",),
    hf_class="Lfm3ForCausalLM",
    hf_modules={"self_attn.g_proj": "self_attn.gate_proj"},
    hf_defaults=DEFAULTS,
    hf_implied={"activation": "silu"},
    hf_always=("attention_bias",),
    hf_written={"pad_token_id": None},  # the default lies outside of small vocabularies
    hf_names=replace(
        lfm2.HF_NAMES,
        output="self_attn.o_proj",
        query_norm="self_attn.q_norm",
        key_norm="self_attn.k_norm",
        gate=GATE,
        post_attention_norm="post_operator_norm",
        post_mlp_norm="post_ffn_norm",
    ),
    folder_source=folder_source,
    gguf_architectures=("lfm3",),
    gguf_names=replace(lfm2.GGUF_NAMES, gate="attn_gate"),
)
