"""Kimi-Linear: gated delta nets whose states decay by key, attention over latents without positions, experts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Values, Writing
from bifolio.model.expert_fields import ADDS_UP, SIGMOID_EXPERTS, dense_by_type, leading_dense
from bifolio.model.families.deepseek2 import LATENTS, SplitByHead, joined_by_head
from bifolio.model.families.family import Family
from bifolio.model.fields import REQUIRED, Field, Form, Key
from bifolio.model.keyed_tensors import KeyedNames
from bifolio.model.model_file import TensorSource
from bifolio.model.recurrent_fields import EITHER, HEADS, HEADS_BY_LAYER
from bifolio.model.recurrent_tensors import RecurrentNames
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.window_fields import FULL, TYPES, named_kinds
from bifolio.quant.tensor import QuantizedTensor

OWN, ATTENDING, RECURRING, LINEAR = "linear_attn_config", "full_attn_layers", "kda_layers", "linear_attention"
PERIOD = 4  # every fourth layer has attention by default
NORM_EPS = 1e-6  # of the norms of latents, in all models
SHARED = ("num_shared_experts", "n_shared_experts")
NEEDED = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1,
          "use_grouped_topk": True, "num_nextn_predict_layers": 0}  # fmt: skip
EXPERTS_OF_FILES, MLP_OF_CLASS = ".block_sparse_moe.", ".mlp."


# -- kinds of layers --------------------------------------------------------------------------------------------------
def attention_from_hf(values: Reading) -> tuple[bool, ...]:
    """By name, by two lists that count layers from 1, or by a period."""
    if values.json.get(TYPES):
        kinds = named_kinds(values)
        if unknown := set(kinds) - {FULL, LINEAR}:
            raise UnsupportedModelError(f"layers of the kind {unknown.pop()!r} are not supported in Kimi-Linear")
        return tuple(kind == FULL for kind in kinds)
    own, count = values.json.object(OWN), len(values.layers)
    if own.get(ATTENDING) is None or own.get(RECURRING) is None:
        return tuple(layer > 0 and layer % PERIOD == 0 for layer in values.layers)
    attending, recurring = own.counts(ATTENDING, most=count), own.counts(RECURRING, most=count)
    if sorted((*attending, *recurring)) != list(range(1, count + 1)):
        raise own.wrong(ATTENDING, f"a list that has, with {RECURRING}, each of {count} layers once")
    return tuple(layer + 1 in attending for layer in values.layers)


def attention_to_hf(values: Writing) -> dict[str, Any]:
    attends = values["layers.attention"]
    return {
        TYPES: [FULL if attending else LINEAR for attending in attends],
        OWN: {
            ATTENDING: [layer + 1 for layer in values.layers if attends[layer]],
            RECURRING: [layer + 1 for layer in values.layers if not attends[layer]],
            "head_dim": values["recurrent.key_size"],
            "num_heads": values["recurrent.heads"],
            "short_conv_kernel_size": values["recurrent.width"],
        },
    }


def nested(key: str, flat: str, default: int) -> Form:
    """A number of the recurrent layers, in an object of its own or beside the others.

    It is written with the kinds of layers.
    """

    def read(values: Reading) -> int:
        own = values.json.object(OWN)
        return values.json.count(flat, default) if own.get(key) is None else own.count(key)

    return Form(read)


def same_heads(values: Writing) -> dict[str, Any]:
    if values["recurrent.heads"] != values["num_heads"]:
        raise values.refusal(f"{values['recurrent.heads']} recurrent heads beside {values['num_heads']} of attention")
    return {}


def of_key_size(values: Values) -> int:
    return int(values["recurrent.key_size"])


KEYED = (
    *HEADS,
    *HEADS_BY_LAYER,
    EITHER,
    Field("layers.attention", hf=Form(attention_from_hf, attention_to_hf)),
    Field("recurrent.width", hf=nested("short_conv_kernel_size", "linear_conv_kernel_dim", 4)),
    Field(
        "recurrent.heads",
        hf=nested("num_heads", "linear_num_heads", 32),
        gguf=Form(lambda v: v["num_heads"], same_heads),
    ),
    Field("recurrent.groups", gguf=None, default=lambda v: v["recurrent.heads"]),
    Field("recurrent.key_size", hf=nested("head_dim", "linear_head_dim", 128), gguf="kda.head_dim", default=REQUIRED),
    Field("recurrent.value_size", gguf=None, default=of_key_size),
    Field("recurrent.step_rank", default=of_key_size),
)


# -- attention --------------------------------------------------------------------------------------------------------
def score_scale(values: Reading) -> float:
    return 1 / math.sqrt(values["mla.rope_size"] + values["mla.nope_size"])


def query_rank(values: Reading) -> int:
    has_rank = "attn_q_a.weight" in values.header.in_layers
    return values.header.count(".attention.q_lora_rank", 0) if has_rank else 0


ATTENTION = (
    *LATENTS,
    Field("ropes", hf=None, gguf=None, default=()),
    Field("attention_scale", hf=Form(score_scale), gguf=Form(score_scale)),
    Field("mla.query_rank", gguf=Key("attention.q_lora_rank", reader=query_rank, optional=True)),
    Field("max_position", hf=Key(("model_max_length", "max_position_embeddings"), default=1 << 20)),
)


# -- experts ----------------------------------------------------------------------------------------------------------
def shared_size(values: Reading) -> int:
    key = next((key for key in SHARED if values.json.get(key) is not None), SHARED[0])
    return int(values["moe.expert_size"]) * values.json.count(key, 1, least=0)


def write_shared(values: Writing) -> dict[str, int]:
    return {SHARED[0]: values["moe.shared_size"] // values["moe.expert_size"]}


EXPERTS = (
    *SIGMOID_EXPERTS,
    Field("moe.num_experts", hf=("num_experts", "num_local_experts", "n_routed_experts")),
    Field("moe.top_k", hf=("num_experts_per_token", "num_experts_per_tok")),
    Field("moe.renormalise", hf=Key(("moe_renormalize", "norm_topk_prob"), default=True), gguf=ADDS_UP),
    Field("moe.num_groups", hf=Key(("num_expert_group", "n_group"), read=lambda count: count or 1, default=1)),
    Field("moe.shared_size", hf=Form(shared_size, write_shared)),
    Field(
        "layers.dense",
        hf=Form(dense_by_type(1).read, lambda v: {"first_k_dense_replace": leading_dense(v)}),
    ),
)


@dataclass(frozen=True, slots=True)
class EitherMlp:
    """The tensors of a folder, whose MLPs may have the names of transformers' class or those of the first files."""

    source: TensorSource

    def _name(self, name: str) -> str:
        for one, other in ((EXPERTS_OF_FILES, MLP_OF_CLASS), (MLP_OF_CLASS, EXPERTS_OF_FILES)):
            renamed = name.replace(one, other)
            if not self.source.has(name) and self.source.has(renamed):
                return renamed
        return name

    def has(self, name: str) -> bool:
        return self.source.has(self._name(name))

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        return self.source.view(self._name(name), shape)


def folder_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    return SplitByHead(EitherMlp(source), config)


def names_of_folders(prefix: str = "self_attn.") -> RecurrentNames:
    inputs = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
    return RecurrentNames(
        tuple((prefix + name, 1) for name in inputs),
        conv=(f"{prefix}q_conv1d", f"{prefix}k_conv1d", f"{prefix}v_conv1d"),
        output=f"{prefix}o_proj",
        decay=f"{prefix}A_log",
        bias=f"{prefix}dt_bias",
        norm=f"{prefix}o_norm",
        conv_axis=True,
        decay_axes=True,
        decay_log=True,
        keyed=KeyedNames(f"{prefix}f_b_proj", f"{prefix}g_b_proj"),
    )


FAMILY = Family(
    name="kimi_linear",
    network={"layers.rope": (), "recurrent.kind": "keyed", "mla.norm_eps": NORM_EPS},
    fields=(*ATTENTION, *KEYED, *EXPERTS),
    hf_types=("kimi_linear",),
    hf_class="KimiLinearForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5, "bos_token_id": 163584, "eos_token_id": 163586},
    hf_implied={"layers.window": ()},
    hf_written={"pad_token_id": None, **NEEDED},  # the default of padding lies outside of small vocabularies
    hf_needed=NEEDED,
    hf_refused={"attention_bias": "Kimi-Linear with biases in attention is not supported"},
    hf_names=replace(
        HF_LLAMA,
        router="block_sparse_moe.gate",
        selection_bias="block_sparse_moe.gate.e_score_correction_bias",
        expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
        shared_up=("block_sparse_moe.shared_experts.gate_proj", "block_sparse_moe.shared_experts.up_proj"),
        shared_down="block_sparse_moe.shared_experts.down_proj",
        recurrent=names_of_folders(),
    ),
    folder_source=folder_source,
    folder_tensors=joined_by_head,
    gguf_architectures=("kimi-linear",),
    gguf_names=replace(
        GGUF_LLAMA,
        recurrent=RecurrentNames(
            (("attn_q", 1), ("attn_k", 1), ("attn_v", 1), ("ssm_beta", 1), ("ssm_f_a", 1), ("ssm_g_a", 1)),
            conv=("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"),
            output="attn_output",
            decay="ssm_a",
            bias="ssm_dt.bias",
            norm="ssm_norm",
            conv_axis=True,
            column_vectors=True,
            keyed=KeyedNames("ssm_f_b", "ssm_g_b"),
        ),
    ),
)  # fmt: skip
