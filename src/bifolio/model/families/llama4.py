"""Llama 4 (text): attention in chunks of the context, layers without positions, a routed expert and a shared one.

The weight of an expert multiplies its input. Layers with rope norm their heads; queries of others grow with position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import AS_THEY_ARE, EXPERTS, LOCAL_EXPERTS, read_scoring, scoring_by
from bifolio.model.export import NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.families.smollm3 import check_positions, positions
from bifolio.model.fields import Field, Form, Key
from bifolio.model.model_file import TensorSource
from bifolio.model.tensor_names import HF_LLAMA
from bifolio.model.window_fields import FULL, TYPES, Windows, largest_window, named_kinds
from bifolio.quant.tensor import QuantizedTensor

PERIOD, CHUNK, CHUNKED = 4, 8192, "chunked_attention"
UNNORMED = 128  # experts of the networks whose heads are not normed
EXPERT_UP, EXPERT_DOWN = "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"
STEP, MOE_LAYERS, SIZE = "interleave_moe_layer_step", "moe_layers", "attention_chunk_size"
TUNED = "attn_temperature_tuning"


# -- folders ----------------------------------------------------------------------------------------------------------
def rope_of_layers(values: Reading) -> tuple[int | None, ...]:
    """1 in `no_rope_layers`: the layer has rope."""
    marks = values.json.counts("no_rope_layers", least=0, most=1)
    if not marks:
        return positions(values, values.json.count("no_rope_layer_interval", PERIOD))
    if len(marks) != len(values.layers):
        raise values.json.wrong("no_rope_layers", f"a list of {len(values.layers)} numbers")
    return tuple(0 if has_rope else None for has_rope in marks)


def chunks(values: Reading) -> Windows:
    size = values.json.count(SIZE, 0, least=0)
    if not size:
        return ()
    if values.json.get(TYPES) is not None:
        kinds = named_kinds(values)
        for kind in kinds:
            if kind not in (FULL, CHUNKED):
                raise UnsupportedModelError(
                    f"{values.json.path}: layers of the kind {kind!r} are not supported in Llama 4"
                )
        return tuple(size if kind == CHUNKED else None for kind in kinds)
    return tuple(None if rope is None else size for rope in values["layers.rope"])


def write_chunks(values: Writing) -> dict[str, Any]:
    kinds = [FULL if window is None else CHUNKED for window in values["layers.window"]]
    return {SIZE: largest_window(values), TYPES: kinds}


def dense_layers(values: Reading) -> tuple[bool, ...]:
    if values.json.get(MOE_LAYERS) is not None:
        routed = values.json.counts(MOE_LAYERS, least=0)
        return tuple(layer not in routed for layer in values.layers)
    step = values.json.count(STEP, 1)
    return tuple((layer + 1) % step != 0 for layer in values.layers)


def write_dense(values: Writing) -> dict[str, Any]:
    return {MOE_LAYERS: [layer for layer in values.layers if not values["layers.dense"][layer]]}


def growth(values: Reading) -> float:
    return values.json.number("attn_scale", 0.1) if values.json.flag(TUNED, True) else 0.0


def write_growth(values: Writing) -> dict[str, Any]:
    found = values["attention_temperature"]
    return {TUNED: bool(found), **({"attn_scale": found} if found else {})}


@dataclass(frozen=True, slots=True)
class Turned:
    """A folder's tensors: those of its experts are stored as [experts, in, out]."""

    source: TensorSource

    def has(self, name: str) -> bool:
        return self.source.has(name.removesuffix(".weight")) or self.source.has(name)

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        stored = name.removesuffix(".weight")
        if not stored.endswith((EXPERT_UP, EXPERT_DOWN)):
            return self.source.view(name, shape)
        found = self.source.view(stored, (shape[0], shape[2], shape[1])).dequantize()
        return QuantizedTensor.from_array(np.ascontiguousarray(found.swapaxes(1, 2)))


def turned(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    """The reverse of `Turned`."""
    for tensor in tensors:
        stored = tensor.name.removesuffix(".weight")
        if not stored.endswith((EXPERT_UP, EXPERT_DOWN)):
            yield tensor
            continue
        values = np.ascontiguousarray(tensor.rearranged().dequantize().swapaxes(1, 2))
        yield NamedTensor(stored, QuantizedTensor.from_array(values), "matrix")


# -- GGUF files -------------------------------------------------------------------------------------------------------
def chunks_from_gguf(values: Reading) -> Windows:
    size = values.header.count(".attention.sliding_window", CHUNK)
    return tuple(None if rope is None else size for rope in values["layers.rope"]) if size else ()


def chunks_to_gguf(values: Writing) -> dict[str, Any]:
    both = zip(values["layers.window"], values["layers.rope"], strict=True)
    if (size := largest_window(values)) is not None and any(
        (window is None) != (rope is None) for window, rope in both
    ):
        raise values.refusal("chunks in other layers than those with rope")
    return {"attention.sliding_window": size or 0}


def dense_from_gguf(values: Reading) -> tuple[bool, ...]:
    step = values.header.count(f".{STEP}", 1)
    return tuple((layer + 1) % step != 0 for layer in values.layers)


def dense_to_gguf(values: Writing) -> dict[str, int]:
    dense = values["layers.dense"]
    step = next((layer + 1 for layer in values.layers if not dense[layer]), 1)
    if any(dense[layer] != ((layer + 1) % step != 0) for layer in values.layers):
        raise values.refusal("experts in layers that are not every n-th one")
    return {STEP: step}


def check_norms(values: Writing) -> dict[str, Any]:
    if values["qk_norm"] != (values["moe.num_experts"] != UNNORMED):
        raise values.refusal(f"qk_norm = {values['qk_norm']} and {values['moe.num_experts']} experts")
    return {}


FAMILY = Family(
    name="llama4",
    network={"qk_norm_after_rope": True, "qk_norm_rotated": True, "temperature_unrotated": True,
             "window_in_chunks": True},
    fields=(
        *EXPERTS,
        LOCAL_EXPERTS,
        Field("moe.expert_size", hf="intermediate_size"),
        Field("moe.shared_size", hf=None, default=lambda v: v["moe.expert_size"]),
        Field("moe.scoring", gguf=scoring_by(lambda v: read_scoring(v, 2)), default="sigmoid"),
        Field("moe.renormalise", hf=None, gguf=AS_THEY_ARE),
        Field("moe.scales_inputs", default=True),
        Field("intermediate_size", hf=("intermediate_size_mlp", "intermediate_size")),
        Field("layers.dense", hf=Form(dense_layers, write_dense), gguf=Form(dense_from_gguf, dense_to_gguf)),
        Field(
            "layers.rope",
            hf=Form(rope_of_layers, lambda v: {"no_rope_layers": [int(n is not None) for n in v["layers.rope"]]}),
            gguf=Form(lambda v: positions(v, PERIOD), check_positions),
        ),
        Field("layers.window", hf=Form(chunks, write_chunks), gguf=Form(chunks_from_gguf, chunks_to_gguf)),
        Field("qk_norm", hf=Key("use_qk_norm", default=True),
              gguf=Form(lambda v: v["moe.num_experts"] != UNNORMED, check_norms)),
        Field("attention_temperature", hf=Form(growth, write_growth),
              gguf=Key("attention.temperature_scale", default=0.1)),
        Field("temperature_period", hf=Key("floor_scale", default=CHUNK),
              gguf=Key("attention.temperature_length", default=CHUNK)),
    ),
    hf_types=("llama4_text", "llama4"),
    hf_class="Llama4ForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 1,
                 "num_local_experts": 16, "max_position_embeddings": 131072, "rope_theta": 500000.0, "bos_token_id": 1,
                 "eos_token_id": 2},
    hf_implied={"mlp_bias": False},
    hf_always=("attention_bias", "num_experts_per_tok"),
    hf_text_part=True,
    hf_names=replace(
        HF_LLAMA,
        up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        router="feed_forward.router",
        expert_up=(EXPERT_UP,),
        expert_down=EXPERT_DOWN,
        shared_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
        shared_down="feed_forward.shared_expert.down_proj",
    ),
    hf_interleaved=True,
    folder_source=lambda source, config: Turned(source),
    folder_tensors=turned,
    gguf_architectures=("llama4",),
    gguf_interleaved=True,
)  # fmt: skip
