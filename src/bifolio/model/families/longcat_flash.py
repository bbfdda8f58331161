"""LongCat-Flash: attention over cached latents, two parts a layer, experts beside both, some without weights.

    layer of a folder   |<- attention 0 -> MLP 0 ->|<- attention 1 -> MLP 1 ->| + experts
    layers here         |<---- with experts ------>|<------ plain ----------->|

The experts of a layer read the input of its first MLP and are added behind its second part. Folders hold the norms of
latents without the factors by which queries and latents are multiplied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import EXPERTS
from bifolio.model.export import NamedTensor
from bifolio.model.families.deepseek2 import LATENTS, REFUSED, SplitByHead, joined_by_head
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form, Key
from bifolio.model.latent_names import HF_LATENT
from bifolio.model.model_file import TensorSource
from bifolio.model.tensor_names import HF_LLAMA
from bifolio.quant.tensor import QuantizedTensor

PARTS = 2  # of a layer of a folder
OF_PART = ("self_attn.", "input_layernorm.", "post_attention_layernorm.")  # each part has its own
LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
MLP = re.compile(r"mlp\.(gate|up|down)_proj\.")
MULTIPLIED = {HF_LATENT.query_norm: "query_rank", HF_LATENT.latent_norm: "latent_size"}  # norms: sizes of latents
BIAS = "router.e_score_correction_bias"


def in_folder(name: str) -> str:
    """The name of a tensor in folders."""
    found = LAYER.fullmatch(name)
    if found is None:
        return name
    layer, part = divmod(int(found[1]), PARTS)
    rest = found[2]
    for own in OF_PART:
        rest = rest.replace(own, f"{own}{part}.", 1) if rest.startswith(own) else rest
    rest = MLP.sub(rf"mlps.{part}.\1_proj.", rest)
    return f"model.layers.{layer}.{rest}"


def factor_of(name: str, config: ModelConfig) -> float | None:
    """The factor of queries or latents behind this norm."""
    size = next((size for norm, size in MULTIPLIED.items() if f".{norm}." in name), None)
    return None if size is None else float((config.hidden_size / getattr(config.mla, size)) ** 0.5)


def times(tensor: QuantizedTensor, factor: float | None) -> QuantizedTensor:
    if factor is None:
        return tensor
    return QuantizedTensor.from_array((tensor.dequantize() * np.float32(factor)).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Halved:
    """A folder's tensors, with each part of a layer as a layer."""

    source: TensorSource
    config: ModelConfig

    def has(self, name: str) -> bool:
        return self.source.has(in_folder(name))

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        return times(self.source.view(in_folder(name), shape), factor_of(name, self.config))


def halved(source: TensorSource, config: ModelConfig) -> TensorSource:
    return SplitByHead(Halved(source, config), config)


def whole(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    """The reverse of `halved`. transformers expects matrices of experts that return their input, and uses none."""
    for tensor in joined_by_head(tensors, config):
        factor = factor_of(tensor.name, config)
        if factor is not None:
            tensor = replace(tensor, tensor=times(tensor.rearranged(), 1 / factor))
        yield replace(tensor, name=in_folder(tensor.name))
    moe = config.moe
    if moe is None:
        return
    unused = QuantizedTensor.from_array(np.zeros((moe.expert_size, config.hidden_size), np.float32))
    for layer, number in product(range(config.num_layers // PARTS), range(moe.zero_experts)):
        for part in HF_LLAMA.expert_up:
            name = f"model.layers.{layer}.{part.format(moe.num_experts + number)}.weight"
            yield NamedTensor(name, unused, "matrix")


def second_parts(values: Reading) -> tuple[bool, ...]:
    """Every second layer has no experts."""
    return tuple(layer % PARTS == 1 for layer in values.layers)


def check_parts(values: Writing) -> dict[str, Any]:
    if values["layers.dense"] != tuple(layer % PARTS == 1 for layer in values.layers):
        raise values.refusal("layers with experts other than every second one")
    return {}


def write_shared(values: Writing) -> dict[str, Any]:
    if values["moe.shared_size"] != values["intermediate_size"]:
        raise values.refusal(f"a first MLP of {values['moe.shared_size']}", "one as wide as the second")
    return {}


FAMILY = Family(
    name="longcat_flash",
    network={"moe.shortcut": True},
    fields=(
        *LATENTS,
        *EXPERTS,
        Field("num_layers", hf=Key("num_layers", read=lambda count: PARTS * count, write=lambda n: n // PARTS)),
        Field("intermediate_size", hf="ffn_hidden_size"),
        Field("moe.num_experts", hf="n_routed_experts"),
        Field("moe.zero_experts", hf="zero_expert_num", gguf=Key("zero_expert_count", optional=True)),
        Field("moe.top_k", hf="moe_topk"),
        Field("moe.expert_size", hf="expert_ffn_hidden_size"),
        Field("moe.scale", hf="routed_scaling_factor"),
        Field("moe.selection_bias", hf=None, gguf=None, default=True),
        Field("moe.shared_size", hf=Form(lambda v: v["intermediate_size"], write_shared)),
        Field("layers.dense", hf=Form(second_parts, check_parts), gguf=Form(second_parts, check_parts)),
    ),
    hf_types=("longcat_flash",),
    hf_class="LongcatFlashForCausalLM",
    hf_defaults={"ffn_hidden_size": 12288, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
                 "qk_nope_head_dim": 128, "v_head_dim": 128, "moe_topk": 12, "n_routed_experts": 512,
                 "zero_expert_num": 256, "expert_ffn_hidden_size": 2048, "routed_scaling_factor": 6.0,
                 "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2},
    hf_always=("zero_expert_num", "routed_scaling_factor"),
    hf_refused={"attention_bias": "LongCat-Flash with biases in attention is not supported",
                "router_bias": "LongCat-Flash with a bias of the router is not supported"},
    hf_needed={"zero_expert_type": "identity", "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
               "attention_method": "MLA", "hidden_act": "silu"},
    hf_names=replace(
        HF_LLAMA,
        router="mlp.router.classifier",
        selection_bias=f"mlp.{BIAS}",
        shared_up=("mlps.0.gate_proj", "mlps.0.up_proj"),
        shared_down="mlps.0.down_proj",
    ),
    hf_interleaved=True,
    folder_source=halved,
    folder_tensors=whole,
    gguf_architectures=("longcat-flash",),
    gguf_interleaved=True,
    gguf_refused=REFUSED,
)  # fmt: skip
