"""Qwen3.5 with experts beside a gated shared MLP, such as Qwen3.5-35B-A3B."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.families import qwen3next, qwen35
from bifolio.model.families.family import Family
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import Raw
from bifolio.model.model_file import TensorSource
from bifolio.model.next_token_names import GGUF_QWEN_NEXT_TOKEN, QWEN_NEXT_TOKEN
from bifolio.model.stored_form import reading, writing
from bifolio.quant.tensor import QuantizedTensor

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = qwen35.text_part(raw)
    return qwen3next.delta_from_hf(raw, name, moe=qwen3next.experts_from_hf(raw))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    return qwen3next.config_to_hf(config)


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    moe = qwen3next.gated_experts_from_gguf(file, metadata)
    return qwen3next.delta_from_gguf(file, metadata, name, moe=moe, tiled=True)


@dataclass(frozen=True, slots=True)
class EachExpert:
    """The tensors of a folder, which may store all experts of a layer in two tensors: gate and up, and down."""

    source: TensorSource
    config: ModelConfig

    def has(self, name: str) -> bool:
        return self.source.has(self._stored(name) or name)

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        stored, moe = self._stored(name), self.config.moe
        found = EXPERT.fullmatch(name)
        if stored is None or found is None or moe is None:
            return self.source.view(name, shape)
        size, halves = shape[0], 1 if found[3] == "down" else 2
        tensor = self.source.view(stored, (moe.num_experts, halves * size, shape[1]))
        start = (int(found[2]) * halves + (found[3] == "up")) * size
        return tensor.select_rows(slice(start, start + size))

    def _stored(self, name: str) -> str | None:
        """The tensor of all experts that holds this one; None: the folder has a tensor of this name, or neither."""
        found = EXPERT.fullmatch(name)
        if found is None or self.source.has(name):
            return None
        stored = f"{found[1]}.{'down' if found[3] == 'down' else 'gate_up'}_proj"
        return stored if self.source.has(stored) else None


def folder_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    return reading(qwen35.folder_form)(EachExpert(source, config), config)


FAMILY = Family(
    name="qwen35moe",
    hf_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    hf_class="Qwen3_5MoeForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=qwen3next.HF_NAMES,
    norm_offset=qwen3next.NORM_OFFSET,
    folder_source=folder_source,
    folder_tensors=writing(qwen35.folder_form),
    gguf_architectures=("qwen35moe",),
    written_as="qwen35moe",
    config_from_gguf=config_from_gguf,
    gguf_names=qwen3next.GGUF_NAMES,
    gguf_source=reading(qwen35.gguf_form),
    gguf_tensors=writing(qwen35.gguf_form),
    gguf_tiled=True,
    gguf_entries=qwen35.gguf_entries,
    hf_next_token=QWEN_NEXT_TOKEN,
    gguf_next_token=GGUF_QWEN_NEXT_TOKEN,
)
