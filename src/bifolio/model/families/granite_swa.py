"""Granite with windows: sinks in every layer, a window on three of four layers, and a base of rope for each layer.

GGUF files are those of bifolio alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.config import RopeConfig
from bifolio.model.description import Reading, Writing
from bifolio.model.families.cwm import windows
from bifolio.model.families.family import Family
from bifolio.model.families.granite import SCALES
from bifolio.model.fields import Field, Form
from bifolio.model.gguf import rope_fields
from bifolio.model.huggingface.rope_fields import read_rope, rope_parameters, written_ropes
from bifolio.model.window_fields import BY_TYPE

THETAS, FILE_THETAS = "layer_rope_theta", "rope.layer_freq_base"  # 0: the layer has no rope


# -- folders ----------------------------------------------------------------------------------------------------------
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


def layer_ropes(found: tuple[float, ...]) -> tuple[int | None, ...]:
    different = sorted(set(found) - {0.0})
    return tuple(different.index(theta) if theta else None for theta in found)


def written_thetas(values: Writing) -> list[float]:
    return [0.0 if rope is None else values.config.ropes[rope].theta for rope in values["layers.rope"]]


# -- GGUF files -------------------------------------------------------------------------------------------------------
def thetas_from_gguf(values: Reading) -> tuple[float, ...]:
    found = values.header.array("." + FILE_THETAS)
    if found is None or len(found) != len(values.layers):
        raise values.header.wrong("." + FILE_THETAS, f"a list of {len(values.layers)} numbers")
    return tuple(round(float(theta), 3) for theta in found.tolist())


def ropes_from_gguf(values: Reading) -> tuple[RopeConfig, ...]:
    rope = rope_fields.read_rope(values)
    return tuple(replace(rope, theta=theta) for theta in sorted(set(thetas_from_gguf(values)) - {0.0}))


def ropes_to_gguf(values: Writing) -> dict[str, Any]:
    if any(rope.scaling not in ("none", "linear") for rope in values.config.ropes[1:]):
        raise values.refusal("several bases of a scaled rope")
    entries = {key: value for key, value in rope_fields.rope_entries(values).items() if not key.endswith("_swa")}
    return {**entries, FILE_THETAS: np.array(written_thetas(values), np.float32)}


LAYERS = (
    *SCALES,
    Field("layers.window", hf=Form(windows, BY_TYPE.write)),
    Field("ropes", hf=Form(ropes, written_ropes), gguf=Form(ropes_from_gguf, ropes_to_gguf)),
    Field(
        "layers.rope",
        hf=Form(lambda v: layer_ropes(thetas(v)), lambda v: {THETAS: written_thetas(v)}),
        gguf=Form(lambda v: layer_ropes(thetas_from_gguf(v))),
    ),
)
DEFAULTS = {"sliding_window": 128}

FAMILY = Family(
    name="granite_swa",
    network={"sinks": True},
    fields=LAYERS,
    hf_types=("granite_swa",),
    hf_class="GraniteSWAForCausalLM",
    hf_defaults={**DEFAULTS, "rms_norm_eps": 1e-5, "num_key_value_heads": 4, "max_position_embeddings": 8192,
                 "tie_word_embeddings": True, "bos_token_id": 100257, "eos_token_id": 100257},
    hf_always=("attention_bias", "mlp_bias"),
    gguf_architectures=("granite-swa",),
)  # fmt: skip
