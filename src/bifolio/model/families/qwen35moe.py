"""Qwen3.5 with experts beside a gated shared MLP, such as Qwen3.5-35B-A3B."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bifolio.config import ModelConfig
from bifolio.model.families import qwen3next, qwen35
from bifolio.model.families.family import Family
from bifolio.model.model_file import TensorSource
from bifolio.model.next_token_names import GGUF_QWEN_NEXT_TOKEN, QWEN_NEXT_TOKEN
from bifolio.model.stored_form import reading, writing
from bifolio.quant.tensor import QuantizedTensor

EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


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
