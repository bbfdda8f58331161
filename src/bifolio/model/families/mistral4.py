"""Mistral Small 4: attention over cached latents, queries that grow with the log of their position, and experts.

Softmax scores choose the experts, in groups that their two best ones rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import EXPERTS, leading, of_expert_size
from bifolio.model.export import NamedTensor
from bifolio.model.families.deepseek2 import (
    LATENTS,
    SplitByHead,
    cached_size,
    enlargement,
    joined_by_head,
    ropes_from_gguf,
    ropes_to_gguf,
)
from bifolio.model.families.family import Family
from bifolio.model.families.mistral3 import GGUF_PERIOD, PERIOD
from bifolio.model.fields import Field, Form, Key
from bifolio.model.huggingface.rope_fields import PARAMETERS, read_rope, rope_object, rope_parameters
from bifolio.model.model_file import TensorSource
from bifolio.model.tensor_names import HF_LLAMA
from bifolio.quant.tensor import QuantizedTensor

NORM_EPS = 1e-6  # of the norms of latents, in all models
GROWTH, LENGTH = "llama_4_scaling_beta", ".attention.temperature_length"


def rope(values: Reading) -> tuple[RopeConfig, ...]:
    """`partial_rotary_factor` is the rotated part of a head, which the size of that part says, too."""
    found = read_rope(values, rope_parameters(values), values["mla.rope_size"])
    return (replace(found, rotary_dim=values["mla.rope_size"]),)


def ropes_to_hf(values: Writing) -> dict[str, Any]:
    own, multiplier = values.config.ropes[0], enlargement(values)
    share = values["mla.rope_size"] / (values["mla.rope_size"] + values["mla.nope_size"])
    parameters = {
        **rope_object(own),
        "partial_rotary_factor": share,
        PERIOD: values["temperature_period"],
        GROWTH: values["attention_temperature"],
    }
    if own.scaling == "yarn" and own.original_max_position != values["temperature_period"]:
        raise values.refusal(f"a temperature that grows after {values['temperature_period']} positions")
    return {PARAMETERS: parameters | ({"mscale": multiplier, "mscale_all_dim": multiplier} if multiplier else {})}


def period_from_gguf(values: Reading) -> int:
    return values.header.count(LENGTH, values.header.count(f".{GGUF_PERIOD}", 0)) or 1


def period_to_gguf(values: Writing) -> dict[str, int]:
    return {LENGTH[1:]: values["temperature_period"]} if values["attention_temperature"] else {}


def stored_name(name: str) -> str:
    """Folders hold the experts of a layer in two tensors, whose names have no suffix."""
    return name.removesuffix(".weight") if ".mlp.experts." in name else name


@dataclass(frozen=True, slots=True)
class JointExperts:
    """The tensors of a folder."""

    source: TensorSource

    def has(self, name: str) -> bool:
        return self.source.has(stored_name(name))

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        return self.source.view(stored_name(name), shape)


def folder_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    return SplitByHead(JointExperts(source), config)


def folder_tensors(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    for tensor in joined_by_head(tensors, config):
        yield replace(tensor, name=stored_name(tensor.name))


FAMILY = Family(
    name="mistral4",
    network={"mla.norm_eps": NORM_EPS},
    fields=(
        *LATENTS,
        *EXPERTS,
        Field("head_dim", hf=Form(cached_size, lambda v: {"head_dim": v["mla.rope_size"] + v["mla.nope_size"]})),
        Field("ropes", hf=Form(rope, ropes_to_hf), gguf=Form(ropes_from_gguf, ropes_to_gguf)),
        Field(
            "attention_temperature",
            hf=Form(lambda v: rope_parameters(v).number(GROWTH, 0.0)),
            gguf="attention.temperature_scale",
            optional=True,
        ),
        Field(
            "temperature_period",
            hf=Form(lambda v: rope_parameters(v).count(PERIOD, 0, least=0) or 1),
            gguf=Form(period_from_gguf, period_to_gguf),
        ),
        Field("moe.num_experts", hf=("n_routed_experts", "num_local_experts", "num_experts")),
        Field("moe.renormalise", hf=Key("norm_topk_prob", default=True)),
        Field("moe.scale", hf="routed_scaling_factor"),
        Field("moe.num_groups", hf=Key("n_group", read=lambda count: count or 1)),
        Field("moe.top_groups", hf=Key("topk_group", read=lambda count: count or 1)),
        Field("moe.group_best", default=2),
        Field("moe.shared_size", hf=of_expert_size("n_shared_experts", 1)),
        Field("layers.dense", hf=leading("first_k_dense_replace")),
    ),
    hf_types=("mistral4",),
    hf_class="Mistral4ForCausalLM",
    hf_defaults={"kv_lora_rank": 256, "q_lora_rank": 1024, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64,
                 "v_head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048,
                 "max_position_embeddings": 1048576, "bos_token_id": 1, "eos_token_id": 2},
    hf_implied={"layers.window": ()},
    hf_refused={"attention_bias": "Mistral 4 with biases in attention is not supported",
                "sliding_window": "Mistral 4 with windows is not supported"},
    hf_needed={"rope_interleave": True, "hidden_act": "silu"},
    hf_text_part=True,
    hf_interleaved=True,
    hf_names=replace(HF_LLAMA, expert_up=("mlp.experts.gate_up_proj",), expert_down="mlp.experts.down_proj"),
    folder_source=folder_source,
    folder_tensors=folder_tensors,
    gguf_architectures=("mistral4",),
    gguf_interleaved=True,
)  # fmt: skip
