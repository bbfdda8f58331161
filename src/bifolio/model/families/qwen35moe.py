"""Qwen3.5 with experts beside a gated shared MLP, such as Qwen3.5-35B-A3B."""

from __future__ import annotations

from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families import qwen3next, qwen35
from bifolio.model.families.family import Family
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import Raw
from bifolio.model.stored_form import reading, writing


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = qwen35.text_part(raw)
    return qwen3next.delta_from_hf(raw, name, moe=qwen3next.experts_from_hf(raw))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return qwen3next.config_to_hf(config)


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    moe = qwen3next.gated_experts_from_gguf(file, metadata)
    return qwen3next.delta_from_gguf(file, metadata, name, moe=moe, tiled=True)


FAMILY = Family(
    name="qwen35moe",
    hf_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    hf_class="Qwen3_5MoeForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=qwen3next.HF_NAMES,
    norm_offset=qwen3next.NORM_OFFSET,
    folder_source=reading(qwen35.folder_form),
    folder_tensors=writing(qwen35.folder_form),
    gguf_architectures=("qwen35moe",),
    written_as="qwen35moe",
    config_from_gguf=config_from_gguf,
    gguf_names=qwen3next.GGUF_NAMES,
    gguf_source=reading(qwen35.gguf_form),
    gguf_tensors=writing(qwen35.gguf_form),
    gguf_tiled=True,
    gguf_entries=qwen35.gguf_entries,
)
