"""Qwen3.5 without experts: gated delta nets, and gated attention in every fourth layer.

Folders of models for text and images are read as their text part. In text all three positions of a token are equal, so
that rope is plain.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.description import Writing
from bifolio.model.families import qwen3next
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.gguf.rope_fields import read_rope, rope_entries
from bifolio.model.next_token_names import GGUF_QWEN_NEXT_TOKEN, QWEN_NEXT_TOKEN
from bifolio.model.stored_form import StoredForm, reading, writing

SECTIONS = (11, 11, 10, 0)  # pairs of a head that are rotated by each position of an image; 0: none


def folder_form(config: ModelConfig) -> StoredForm:
    return StoredForm((qwen3next.queries_and_gates(config, "self_attn.q_proj", "self_attn.gate"),))


def gguf_form(config: ModelConfig) -> StoredForm:
    joined = (qwen3next.queries_and_gates(config, "attn_q", "query_gate"),)
    return StoredForm(joined, flat=("ffn_gate_inp_shexp.weight",))


def sections(values: Writing) -> dict[str, Any]:
    """Text has one position for each token, but the architecture has an entry for three."""
    pairs = values.config.ropes[0].rotary_dim // 2
    found = SECTIONS if pairs == sum(SECTIONS) else (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0)
    return {**rope_entries(values), "rope.dimension_sections": np.array(found, np.int32)}


ROPES = Field("ropes", gguf=Form(lambda v: (read_rope(v),), sections))
FAMILY = Family(
    name="qwen35",
    network=qwen3next.NETWORK,
    fields=(*qwen3next.DELTA, ROPES),
    hf_types=("qwen3_5_text", "qwen3_5"),
    hf_class="Qwen3_5ForCausalLM",
    hf_defaults=qwen3next.DEFAULTS,
    hf_implied=qwen3next.IMPLIED,
    hf_always=("attention_bias",),
    hf_text_part=True,
    hf_names=qwen3next.HF_NAMES,
    norm_offset=qwen3next.NORM_OFFSET,
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("qwen35",),
    gguf_names=qwen3next.GGUF_NAMES,
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
    gguf_tiled=True,
    hf_next_token=QWEN_NEXT_TOKEN,
    gguf_next_token=GGUF_QWEN_NEXT_TOKEN,
)
