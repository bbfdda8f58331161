"""Ministral 3 and the text part of Mistral Small 3: Mistral whose queries grow with the log of their position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bifolio.config import RopeConfig
from bifolio.model.description import Reading, Writing
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.gguf.rope_fields import read_rope, rope_entries
from bifolio.model.huggingface.rope_fields import PARAMETERS, read_ropes, rope_object, rope_parameters

PERIOD, GGUF_PERIOD = "original_max_position_embeddings", "rope.scaling.original_context_length"


def variant(raw: Mapping[str, Any]) -> str:
    """The type of the text part of a model of text and images."""
    inner = raw.get("text_config")
    named = inner.get("model_type") if isinstance(inner, Mapping) else None
    return "mistral4" if named == "mistral4" else "mistral3"


def ropes_to_hf(values: Writing) -> dict[str, Any]:
    growth = {PERIOD: values["temperature_period"], "llama_4_scaling_beta": values["attention_temperature"]}
    return {PARAMETERS: {**rope_object(values.config.ropes[0]), **growth}}


def ropes_from_gguf(values: Reading) -> tuple[RopeConfig, ...]:
    """The file gives the divisor of yarn's default factor."""
    rope = read_rope(values)
    multiplier = values.header.number(".rope.scaling.yarn_log_multiplier", 0.0)
    if not multiplier or rope.scaling != "yarn":
        return (rope,)
    growth = 0.1 * math.log(max(rope.factor, 1.0))
    return (replace(rope, attention_factor=(1 + growth) / (1 + multiplier * growth)),)


FAMILY = Family(
    name="mistral3",
    fields=(
        Field("ropes", hf=Form(read_ropes, ropes_to_hf), gguf=Form(ropes_from_gguf, rope_entries)),
        Field(
            "attention_temperature",
            hf=Form(lambda v: rope_parameters(v).number("llama_4_scaling_beta", 0.0)),
            gguf="attention.temperature_scale",
            optional=True,
        ),
        Field(
            "temperature_period",
            hf=Form(lambda v: rope_parameters(v).count(PERIOD, 0, least=0) or 1),
            gguf=Form(
                lambda v: v.header.count(f".{GGUF_PERIOD}", 0) or 1,
                lambda v: {GGUF_PERIOD: v["temperature_period"]} if v["attention_temperature"] else {},
            ),
        ),
    ),
    hf_types=("ministral3", "mistral3"),
    hf_variant=variant,
    hf_class="Ministral3ForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2},
    hf_always=("sliding_window",),
    hf_text_part=True,
    gguf_architectures=("mistral3",),
    gguf_interleaved=True,
)
