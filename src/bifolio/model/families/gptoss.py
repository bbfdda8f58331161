"""gpt-oss: experts in MXFP4 with biases and a clamped SwiGLU, attention sinks, a window in every second layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, MoeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.export import NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf, experts_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, Value
from bifolio.model.huggingface.decoder_config import (
    Raw,
    decoder_from_hf,
    decoder_to_hf,
    expert_count,
    largest_window,
    windows_by_type,
    written_layer_types,
)
from bifolio.model.model_file import TensorSource
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.quant.formats import Bytes, QuantFormat
from bifolio.quant.tensor import QuantizedTensor

WINDOW_PERIOD = 2
EXPERTS = "mlp.experts."
GATE, UP, DOWN = f"{EXPERTS}gate_proj", f"{EXPERTS}up_proj", f"{EXPERTS}down_proj"
BOTH = f"{EXPERTS}gate_up_proj"  # of folders: gate and up, row by row in turns


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    moe = MoeConfig(
        num_experts=expert_count(raw),
        top_k=int(raw.get("num_experts_per_tok") or raw["experts_per_token"]),
        expert_size=int(raw["intermediate_size"]),
        renormalise=True,
        router_bias=True,
        expert_bias=True,
    )
    types = raw.get("layer_types") or ["sliding_attention", "full_attention"] * int(raw["num_hidden_layers"])
    windows = windows_by_type({**raw, "layer_types": types[: int(raw["num_hidden_layers"])]})
    return decoder_from_hf(
        {**raw, "attention_bias": raw.get("attention_bias", True)},
        name,
        activation="swiglu_clamped",
        layer_window=windows,
        moe=moe,
        sinks=True,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    experts = {} if moe is None else {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k}
    fields = decoder_to_hf(replace(config, activation="silu"))
    rope = fields.pop("rope_scaling") or {"rope_type": "default"}  # transformers takes yarn where none is given
    theta = fields.pop("rope_theta")
    return {
        **fields,
        "rope_parameters": {"rope_theta": theta, **rope},
        "attention_bias": config.qkv_bias,
        "sliding_window": largest_window(config),
        "layer_types": written_layer_types(config),
        **experts,
    }


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    config = decoder_from_gguf(
        file,
        metadata,
        name,
        window_period=WINDOW_PERIOD,
        activation="swiglu_clamped",
        moe=experts_from_gguf(file, metadata, renormalise=True, scoring="softmax"),
        sinks=True,
    )
    return replace(config, ropes=tuple(replace(rope, truncate=False) for rope in config.ropes))


def gguf_entries(config: ModelConfig) -> dict[str, Value]:
    if any(rope.scaling == "yarn" and rope.truncate for rope in config.ropes):
        raise UnsupportedModelError(
            "GGUF cannot describe a gpt-oss model whose yarn begins and ends at whole dimensions"
        )
    return {}


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


def ggml_blocks(blocks: Bytes, scales: Bytes) -> Bytes:
    """u8[..., 16] codes and u8[...] scales -> u8[..., 17]: the scale, then the codes j and j + 16 in one byte."""
    codes = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    halves = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], halves], axis=-1)


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
    hf_types=("gpt_oss",),
    hf_class="GptOssForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=replace(HF_LLAMA, router="mlp.router", expert_up=(GATE, UP), expert_down=DOWN),
    folder_source=ExpertsByRole,
    folder_tensors=experts_in_turns,
    gguf_architectures=("gpt-oss",),
    written_as="gpt-oss",
    config_from_gguf=config_from_gguf,
    gguf_names=replace(GGUF_LLAMA, mlp_norm="post_attention_norm"),
    gguf_entries=gguf_entries,
    gguf_activation="swiglu_clamped",
    gguf_window_period=WINDOW_PERIOD,
)
