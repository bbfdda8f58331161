"""Qwen3.5 with experts beside a gated shared MLP, such as Qwen3.5-35B-A3B."""

from __future__ import annotations

from bifolio.config import ModelConfig
from bifolio.model.families import qwen3next, qwen35
from bifolio.model.families.family import Family
from bifolio.model.joint_experts import EachExpert
from bifolio.model.model_file import TensorSource
from bifolio.model.next_token_names import GGUF_QWEN_NEXT_TOKEN, QWEN_NEXT_TOKEN
from bifolio.model.stored_form import reading, writing


def folder_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    return reading(qwen35.folder_form)(EachExpert(source, config), config)


FAMILY = Family(
    name="qwen35moe",
    network=qwen3next.NETWORK,
    fields=(*qwen3next.DELTA, qwen35.ROPES, *qwen3next.GATED_EXPERTS, qwen3next.MLP_SIZE),
    hf_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    hf_class="Qwen3_5MoeForCausalLM",
    hf_defaults=qwen3next.DEFAULTS,
    hf_implied=qwen3next.IMPLIED,
    hf_always=("attention_bias",),
    hf_text_part=True,
    hf_names=qwen3next.HF_NAMES,
    norm_offset=qwen3next.NORM_OFFSET,
    folder_source=folder_source,
    folder_tensors=writing(qwen35.folder_form),
    gguf_architectures=("qwen35moe",),
    gguf_names=qwen3next.GGUF_NAMES,
    gguf_source=reading(qwen35.gguf_form),
    gguf_tensors=writing(qwen35.gguf_form),
    gguf_tiled=True,
    hf_next_token=QWEN_NEXT_TOKEN,
    gguf_next_token=GGUF_QWEN_NEXT_TOKEN,
)
