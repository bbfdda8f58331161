"""Qwen3.5 without experts: gated delta nets, and gated attention in every fourth layer.

Folders of models for text and images are read as their text part. In text all three positions of a token are equal, so
that rope is plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.families import qwen3next
from bifolio.model.families.family import Family
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import Raw
from bifolio.model.next_token_names import GGUF_QWEN_NEXT_TOKEN, QWEN_NEXT_TOKEN
from bifolio.model.stored_form import StoredForm, reading, writing

SECTIONS = (11, 11, 10, 0)  # pairs of a head that are rotated by each position of an image; 0: none


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    return qwen3next.delta_from_hf(text_part(raw), name)


def text_part(raw: Raw) -> Raw:
    """The description of the text part, with the fields that only the whole names."""
    inner = raw.get("text_config")
    if not isinstance(inner, Mapping):
        return raw
    outer = {name: raw[name] for name in ("tie_word_embeddings", "bos_token_id", "eos_token_id") if name in raw}
    return {**outer, **inner}


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return qwen3next.delta_to_hf(config)


def folder_form(config: ModelConfig) -> StoredForm:
    return StoredForm((qwen3next.queries_and_gates(config, "self_attn.q_proj", "self_attn.gate"),))


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    return qwen3next.delta_from_gguf(file, metadata, name, tiled=True)


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    """Text has one position for each token, but the architecture has an entry for three."""
    pairs = config.ropes[0].rotary_dim // 2
    sections = SECTIONS if pairs == sum(SECTIONS) else (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0)
    return {**qwen3next.gguf_entries(config), "rope.dimension_sections": np.array(sections, np.int32)}


def gguf_form(config: ModelConfig) -> StoredForm:
    joined = (qwen3next.queries_and_gates(config, "attn_q", "query_gate"),)
    return StoredForm(joined, flat=("ffn_gate_inp_shexp.weight",))


FAMILY = Family(
    name="qwen35",
    hf_types=("qwen3_5_text", "qwen3_5"),
    hf_class="Qwen3_5ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=qwen3next.HF_NAMES,
    norm_offset=qwen3next.NORM_OFFSET,
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("qwen35",),
    written_as="qwen35",
    config_from_gguf=config_from_gguf,
    gguf_names=qwen3next.GGUF_NAMES,
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
    gguf_tiled=True,
    gguf_entries=gguf_entries,
    hf_next_token=QWEN_NEXT_TOKEN,
    gguf_next_token=GGUF_QWEN_NEXT_TOKEN,
)
