"""Zamba2: Mamba-2 layers, some of which have one of a few shared blocks of attention and an MLP in front of them.

A block reads the residual stream beside the embeddings; each use adds products of low rank of its own. GGUF files are
those of bifolio alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.decoder_fields import in_tensors
from bifolio.model.description import Reading, Writing
from bifolio.model.export import NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.families.granitehybrid import ROPES
from bifolio.model.fields import REQUIRED, Field, Form, Key
from bifolio.model.huggingface.rope_fields import read_ropes, written_ropes
from bifolio.model.model_file import TensorSource
from bifolio.model.recurrent_fields import GGUF_MAMBA, HEADS_BY_LAYER, MAMBA, mamba_names
from bifolio.model.shared_tensors import SharedNames
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.window_fields import named_kinds
from bifolio.quant.tensor import QuantizedTensor

BLOCKS, HYBRID, RECURRENT = "layers_block_type", "hybrid", ("mamba", "linear_attention")
WITH_BLOCKS = (6, 12, 18, 24, 30, 36, 42, 47, 51)  # of 54 layers, where config.json does not say it
ROPE = "use_mem_rope"
LAYER, INNER = "model.layers.", "mamba_decoder."  # the recurrent part of a layer with a block has a name of its own
BLOCK = "shared_transformer."
ADAPTERS = tuple(f"{BLOCK}self_attn.linear_{name}_adapter_list.{{}}" for name in "qkv")


# -- folders ----------------------------------------------------------------------------------------------------------
def attention_from_hf(values: Reading) -> tuple[bool, ...]:
    kinds = named_kinds(values, BLOCKS)
    for kind in kinds:
        if kind not in (HYBRID, *RECURRENT):
            raise UnsupportedModelError(f"{values.json.path}: layers of the kind {kind!r} ({BLOCKS}) are not supported")
    return tuple(kind == HYBRID for kind in kinds)


def attention_to_hf(values: Writing) -> dict[str, Any]:
    return {BLOCKS: [HYBRID if attends else RECURRENT[0] for attends in values["layers.attention"]]}


def ropes(values: Reading) -> tuple[RopeConfig, ...]:
    return read_ropes(values) if values.json.flag(ROPE, False) else ()


def stored_name(config: ModelConfig, name: str) -> str:
    """The name in a folder of a tensor of the recurrent part of a layer."""
    layer, _, rest = name.removeprefix(LAYER).partition(".")
    if not name.startswith(LAYER) or not rest.startswith(("mamba.", "input_layernorm.")):
        return name
    return f"{LAYER}{layer}.{INNER}{rest}" if config.layers[int(layer)].attention else name


def folder_tensors(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    return (replace(tensor, name=stored_name(config, tensor.name)) for tensor in tensors)


@dataclass(frozen=True, slots=True)
class FolderTensors:
    """The tensors of a folder by the names that all layers have."""

    source: TensorSource
    config: ModelConfig

    def has(self, name: str) -> bool:
        return self.source.has(stored_name(self.config, name))

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        return self.source.view(stored_name(self.config, name), shape)


LAYERS = (
    *MAMBA,
    *HEADS_BY_LAYER,
    Field("recurrent.heads", hf=Key("n_mamba_heads", default=8)),
    Field("recurrent.groups", hf=Key("mamba_ngroups", default=1)),
    Field("recurrent.key_size", hf=Key("mamba_d_state", default=64)),
    Field("recurrent.conv_bias", hf=None, default=True),
    Field("recurrent.projection_bias", hf="add_bias_linear", gguf=in_tensors("ssm_in.bias")),
    Field("layers.attention", hf=Form(attention_from_hf, attention_to_hf)),
    Field("layers.mlp", default=lambda v: v["layers.attention"]),
    Field("layers.recurrent", default=lambda v: (True,) * len(v.layers)),
    Field("shared_blocks.count", hf=Key("num_mem_blocks", default=1), gguf="shared_block_count", default=REQUIRED),
    Field("shared_blocks.rank", hf=Key("adapter_rank", default=128), gguf="adapter_rank", default=REQUIRED),
    Field(
        "shared_blocks.adapts_attention",
        hf="use_shared_attention_adapter",
        gguf=in_tensors("attn_q_adapter.0.0.weight"),
    ),
)

FAMILY = Family(
    name="zamba2",
    network={"recurrent.norm_eps": 1e-5},
    fields=(
        *LAYERS,
        ROPES,
        Field("ropes", hf=Form(ropes, lambda v: {**written_ropes(v), ROPE: bool(v.config.ropes)})),
        Field("head_dim", hf=None, default=lambda v: 2 * v["hidden_size"] // v["num_heads"]),
        Field("attention_scale", hf=None, default=lambda v: math.sqrt(2 / v["head_dim"])),
        Field("intermediate_size", hf=Key("intermediate_size", default=lambda v: 4 * v["hidden_size"])),
        Field("mlp_bias", hf="add_bias_linear"),
    ),
    hf_types=("zamba2",),
    hf_class="Zamba2ForCausalLM",
    hf_defaults={BLOCKS: [HYBRID if layer in WITH_BLOCKS else RECURRENT[0] for layer in range(54)],
                 "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "hidden_act": "gelu",
                 "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
    hf_implied={"layers.window": (), "qkv_bias": False, "output_bias": False},
    hf_always=("tie_word_embeddings",),
    hf_written={"time_step_min": 1e-30},  # transformers takes it as the lower limit
    hf_needed={"tie_word_embeddings": True},  # without it transformers shares no blocks
    hf_refused={"use_long_context": "Zamba2 with use_long_context is not supported: versions of transformers differ"},
    hf_names=replace(
        HF_LLAMA,
        qkv=tuple(f"{BLOCK}self_attn.{name}_proj" for name in "qkv"),
        output=f"{BLOCK}self_attn.o_proj",
        mlp_norm=f"{BLOCK}pre_ff_layernorm",
        up=(f"{BLOCK}feed_forward.gate_up_proj",),
        down=f"{BLOCK}feed_forward.down_proj",
        final_norm="model.final_layernorm",
        recurrent=mamba_names("mamba"),
        shared=SharedNames(
            f"{BLOCK}input_layernorm", "linear", (*ADAPTERS, f"{BLOCK}feed_forward.gate_up_proj_adapter_list.{{}}")
        ),
    ),
    folder_source=FolderTensors,
    folder_tensors=folder_tensors,
    gguf_architectures=("zamba2",),
    gguf_implied={"activation": "gelu"},
    gguf_names=replace(
        GGUF_LLAMA,
        up=("ffn_up",),
        recurrent=GGUF_MAMBA,
        shared=SharedNames(
            "shared_norm", "shared_out", (*(f"attn_{name}_adapter.{{}}" for name in "qkv"), "ffn_up_adapter.{}")
        ),
    ),
)  # fmt: skip
