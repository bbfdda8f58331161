"""gpt-oss: experts in MXFP4 with biases and a clamped SwiGLU, attention sinks, a window in every second layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import ADD_UP, EXPERTS, LOCAL_EXPERTS, WIDE
from bifolio.model.export import NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.gguf.rope_fields import read_rope, rope_entries
from bifolio.model.huggingface.rope_fields import PARAMETERS, read_ropes, rope_object
from bifolio.model.huggingface.scaled_tensors import ggml_blocks
from bifolio.model.model_file import TensorSource
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.window_fields import BY_TYPE
from bifolio.quant.formats import QuantFormat
from bifolio.quant.tensor import QuantizedTensor

ACTIVATION = "swiglu_clamped"
GATE, UP, DOWN = (f"mlp.experts.{name}_proj" for name in ("gate", "up", "down"))
BOTH = "mlp.experts.gate_up_proj"  # of folders: gate and up, row by row in turns


def ropes_from_gguf(values: Reading) -> tuple[RopeConfig, ...]:
    return (replace(read_rope(values), truncate=False),)


def ropes_to_gguf(values: Writing) -> dict[str, Any]:
    if any(rope.scaling == "yarn" and rope.truncate for rope in values.config.ropes):
        raise values.refusal("yarn that begins and ends at whole dimensions")
    return rope_entries(values)


@dataclass(frozen=True, slots=True)
class ExpertsByRole:
    """A folder's tensors, with gate and up apart and all experts as [experts, out, in]."""

    source: TensorSource
    config: ModelConfig

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        role = next((role for role in (GATE, UP, DOWN) if role in name), None)
        if role is None:
            return self.source.view(name, shape)
        stored = name.replace(role, DOWN if role == DOWN else BOTH).removesuffix(".weight")
        turns = {GATE: slice(0, None, 2), UP: slice(1, None, 2), DOWN: slice(None)}[role]
        rows = shape[1] * (1 if role == DOWN else 2)
        if name.endswith(".bias"):
            values = self.source.view(stored.removesuffix(".bias") + "_bias", (shape[0], rows)).dequantize()
            return QuantizedTensor.from_array(np.ascontiguousarray(values[:, turns]))
        if self.source.has(stored + "_blocks"):
            return self._mxfp4(stored, (shape[0], rows, shape[2]), turns)
        values = self.source.view(stored, (shape[0], shape[2], rows)).dequantize().swapaxes(1, 2)
        return QuantizedTensor.from_array(np.ascontiguousarray(values[:, turns]))

    def _mxfp4(self, name: str, shape: tuple[int, int, int], turns: slice) -> QuantizedTensor:
        """Blocks of 32 codes, two neighbours in a byte, and their scales, as GGML lays them out."""
        experts, rows, columns = shape
        blocks = self.source.view(name + "_blocks", (experts, rows, columns // 32, 16)).data
        scales = self.source.view(name + "_scales", (experts, rows, columns // 32)).data
        packed = ggml_blocks(
            blocks.reshape(experts, rows, columns // 32, 16)[:, turns], scales.reshape(experts, rows, -1)[:, turns]
        )
        kept = packed.shape[1]
        return QuantizedTensor(
            QuantFormat.MXFP4, packed.reshape(experts * kept, -1), (experts, kept, columns), f"{name}_blocks"
        )


def experts_in_turns(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    """The reverse of `ExpertsByRole`, dense."""
    kept: dict[str, np.ndarray] = {}
    for tensor in tensors:
        role = next((role for role in (GATE, UP, DOWN) if role in tensor.name), None)
        if role is None:
            yield tensor
            continue
        values = tensor.rearranged().dequantize()
        is_bias = tensor.name.endswith(".bias")
        if role == GATE:
            kept[tensor.name.replace(GATE, UP)] = values
            continue
        if role == UP:
            values = np.stack([kept.pop(tensor.name), values], axis=2).reshape(len(values), -1, *values.shape[2:])
        name = tensor.name.replace(role, DOWN if role == DOWN else BOTH)
        name = name.removesuffix(".bias") + "_bias" if is_bias else name.removesuffix(".weight")
        stored = values if is_bias else np.ascontiguousarray(values.swapaxes(1, 2))
        yield NamedTensor(name, QuantizedTensor.from_array(stored), tensor.kind)


FAMILY = Family(
    name="gptoss",
    network={"sinks": True},
    fields=(
        *EXPERTS,
        LOCAL_EXPERTS,
        WIDE,
        ADD_UP,
        Field("moe.top_k", hf=("num_experts_per_tok", "experts_per_token")),
        Field("moe.scoring", gguf=Form(lambda v: "softmax", lambda v: {"expert_gating_func": 1})),
        Field("activation", hf=Form(lambda v: ACTIVATION, lambda v: {"hidden_act": "silu"})),
        Field("layers.window", hf=BY_TYPE),
        Field(
            "ropes",
            hf=Form(read_ropes, lambda v: {PARAMETERS: rope_object(v.config.ropes[0])}),
            gguf=Form(ropes_from_gguf, ropes_to_gguf),
        ),
    ),
    window_period=2,
    hf_types=("gpt_oss",),
    hf_class="GptOssForCausalLM",
    hf_defaults={"attention_bias": True},
    hf_implied={"moe.router_bias": True, "moe.expert_bias": True},
    hf_always=("attention_bias",),
    hf_names=replace(HF_LLAMA, router="mlp.router", expert_up=(GATE, UP), expert_down=DOWN),
    folder_source=ExpertsByRole,
    folder_tensors=experts_in_turns,
    gguf_architectures=("gpt-oss",),
    gguf_implied={"activation": ACTIVATION},
    gguf_names=replace(GGUF_LLAMA, mlp_norm="post_attention_norm"),
)
