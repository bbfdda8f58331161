"""Ling 3: gated delta nets whose states decay by key, attention over latents with a gate for each head, experts.

The decays have a bound, and their logits and the gates are whole products, where those of Kimi-Linear are of low rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import LEADING, SIGMOID_EXPERTS, dense_by_type
from bifolio.model.export import NamedTensor
from bifolio.model.families.deepseek2 import LATENTS, SplitByHead, cached_size, joined_by_head, ropes_to_hf
from bifolio.model.families.family import Family
from bifolio.model.families.kimi_linear import query_rank, same_heads
from bifolio.model.fields import REQUIRED, Field, Form, Key
from bifolio.model.huggingface.rope_fields import read_rope, rope_parameters
from bifolio.model.model_file import TensorSource
from bifolio.model.recurrent_fields import EITHER, HEADS, HEADS_BY_LAYER, separate_names
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.window_fields import FULL, TYPES, named_kinds
from bifolio.quant.tensor import QuantizedTensor

LINEAR, PERIOD = "linear_attention", "layer_group_size"  # the last layer of each period has attention
NORM_EPS = 1e-6  # of the norms of latents, in all models
SAFE, BOUND = "kda_safe_gate", "kda_lower_bound"
SHARED, SHARED_WIDTH = ("num_shared_experts", "n_shared_experts"), "moe_shared_expert_intermediate_size"
OWN = (SAFE, BOUND, "short_conv_kernel_size", "linear_conv_kernel_dim")
LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
NEEDED = {"hidden_act": "silu", "no_kda_lora": True, "use_kda_lora": False, "linear_silu": True, "group_norm_size": 1,
          "gated_attention_proj_granularity_type": "head_wise", "use_mla_nope": False, "rope_interleave": True,
          "num_kv_heads_for_linear_attn": 0, "score_function": "sigmoid", "scoring_func": "sigmoid",
          "topk_method": "noaux_tc", "moe_router_enable_expert_bias": True}  # fmt: skip
REFUSED = ("attention_bias", "use_bias", "use_qkv_bias", "use_nGPT", "value_norm", "up_proj_norm", "scale_router_input",
           "pregate_inference", "sliding_window")  # fmt: skip
NAMES_OF_FILES = {  # the names of the class of transformers, and those of the files
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.": ".attention.",
    ".mlp.gate.e_score_correction_bias": ".mlp.gate.expert_bias",
}
OUTPUT = {".attention.o_proj.": ".attention.dense."}


# -- the description --------------------------------------------------------------------------------------------------
def attention_from_hf(values: Reading) -> tuple[bool, ...]:
    if not any(values.json.get(field) is not None for field in OWN):
        raise UnsupportedModelError(
            f"{values.json.path} has none of the fields {', '.join(OWN)} of Ling 3: Ling 2.5, with lightning "
            "attention, is not supported"
        )
    if values.json.get(TYPES) is None:
        period = values.json.count(PERIOD, 6)
        return tuple((layer + 1) % period == 0 for layer in values.layers)
    kinds = named_kinds(values)
    if unknown := set(kinds) - {FULL, LINEAR}:
        raise UnsupportedModelError(f"layers of the kind {unknown.pop()!r} are not supported in Ling 3")
    return tuple(kind == FULL for kind in kinds)


def attention_to_hf(values: Writing) -> dict[str, list[str]]:
    return {TYPES: [FULL if attends else LINEAR for attends in values["layers.attention"]]}


def bound_from_hf(values: Reading) -> float:
    return -values.json.number(BOUND, -5.0) if values.json.flag(SAFE, True) else 0.0


def bound_to_hf(values: Writing) -> dict[str, Any]:
    bound = values["recurrent.decay_bound"]
    return {SAFE: bound > 0, **({BOUND: -bound} if bound else {})}


def bound_from_gguf(values: Reading) -> float:
    return -values.header.number(".kda.gate_lower_bound", -5.0) if values.header.flag(".kda.safe_gate", True) else 0.0


def bound_to_gguf(values: Writing) -> dict[str, Any]:
    bound = values["recurrent.decay_bound"]
    if not bound:
        raise values.refusal("decays without a bound")
    return {"kda.safe_gate": True, "kda.gate_lower_bound": -bound}


def rope(values: Reading) -> tuple[RopeConfig, ...]:
    """`partial_rotary_factor` is a part of the heads of recurrent layers, which are not rotated."""
    found = read_rope(values, rope_parameters(values), values["mla.rope_size"])
    return (replace(found, rotary_dim=values["mla.rope_size"]),)


def shared_size(values: Reading) -> int:
    """The width of the shared experts; limits of experts, which the network does not have, are refused here."""
    for key in LIMITS:
        limits = values.json.get(key) or []
        if not isinstance(limits, list | tuple):
            raise values.json.wrong(key, "a list of numbers")
        if any(limits):
            raise UnsupportedModelError(f"{values.json.path}: {key} has limits, which are not supported in Ling 3")
    key = next((key for key in SHARED if values.json.get(key) is not None), SHARED[0])
    width = int(values["moe.expert_size"]) * values.json.count(key, 1, least=0)
    if values.json.count(SHARED_WIDTH, width, least=0) != width:
        raise UnsupportedModelError(f"{values.json.path}: {SHARED_WIDTH} other than {width} is not supported in Ling 3")
    return width


FIELDS = (
    *LATENTS,
    *HEADS,
    *HEADS_BY_LAYER,
    EITHER,
    *SIGMOID_EXPERTS,
    Field("head_dim", hf=Form(cached_size, lambda v: {"head_dim": v["recurrent.key_size"]})),
    Field("max_position", hf=Key(("model_max_length", "max_position_embeddings"), default=262144)),
    Field("mla.query_rank", hf=Key("q_lora_rank", optional=True),
          gguf=Key("attention.q_lora_rank", reader=query_rank, optional=True)),
    Field("ropes", hf=Form(rope, ropes_to_hf)),
    Field("layers.attention", hf=Form(attention_from_hf, attention_to_hf)),
    Field("recurrent.width", hf=Key(("short_conv_kernel_size", "linear_conv_kernel_dim"), default=4)),
    Field("recurrent.heads", hf=Key("linear_num_heads", default=lambda v: v["num_heads"], optional=True),
          gguf=Form(lambda v: v["num_heads"], same_heads)),
    Field("recurrent.groups", gguf=None, default=lambda v: v["recurrent.heads"]),
    Field("recurrent.key_size", hf=Key(("linear_head_dim", "head_dim"), default=128), gguf="kda.head_dim",
          default=REQUIRED),
    Field("recurrent.value_size", gguf=None, default=lambda v: v["recurrent.key_size"]),
    Field("recurrent.decay_bound", hf=Form(bound_from_hf, bound_to_hf), gguf=Form(bound_from_gguf, bound_to_gguf)),
    Field("moe.num_experts", hf=("num_experts", "num_local_experts")),
    Field("moe.top_k", hf=("num_experts_per_token", "num_experts_per_tok")),
    Field("moe.renormalise", hf=Key(("moe_renormalize", "norm_topk_prob"), default=True)),
    Field("moe.num_groups", hf=Key(("num_expert_group", "n_group"), read=lambda count: count or 1, default=8)),
    Field("moe.top_groups", hf=Key("topk_group", default=4)),
    Field("moe.shared_size",
          hf=Form(shared_size, lambda v: {SHARED[0]: v["moe.shared_size"] // v["moe.expert_size"]})),
    LEADING,
    Field("layers.dense", hf=dense_by_type(2)),
)  # fmt: skip


# -- tensors ----------------------------------------------------------------------------------------------------------
def name_of_files(name: str) -> str:
    for ours, theirs in NAMES_OF_FILES.items():
        name = name.replace(ours, theirs)
    return name


@dataclass(frozen=True, slots=True)
class EitherName:
    """The tensors of a folder under the names of transformers' class or under those of the files."""

    source: TensorSource

    def _name(self, name: str) -> str:
        own = name_of_files(name)
        candidates = name, own, own.replace(*next(iter(OUTPUT.items())))
        return next((each for each in candidates if self.source.has(each)), name)

    def has(self, name: str) -> bool:
        return self.source.has(self._name(name))

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        return self.source.view(self._name(name), shape)


def folder_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    return SplitByHead(EitherName(source), config)


def folder_tensors(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    for tensor in joined_by_head(tensors, config):
        yield replace(tensor, name=name_of_files(tensor.name).replace(*next(iter(OUTPUT.items()))))


FOLDERS = separate_names(
    "self_attn.", ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "f_proj"), "{}_conv1d", "o_proj",
    ("A_log", "dt_bias", "o_norm"),
)  # fmt: skip
GGUF = separate_names(
    "", ("attn_q", "attn_k", "attn_v", "ssm_g_a", "ssm_beta", "ssm_f_a"), "ssm_conv1d_{}", "attn_output",
    ("ssm_a", "ssm_dt.bias", "ssm_norm"),
)  # fmt: skip
FAMILY = Family(
    name="bailing_hybrid",
    network={"recurrent.kind": "keyed", "recurrent.step_rank": 0, "mla.norm_eps": NORM_EPS, "attention_gate": True,
             "gate_by_head": True},
    fields=FIELDS,
    hf_types=("bailing_hybrid",),
    hf_class="BailingHybridForCausalLM",
    hf_defaults={"rope_theta": 6000000.0, "eos_token_id": 156895, "routed_scaling_factor": 2.5},
    hf_implied={"layers.window": ()},
    hf_written={"pad_token_id": None},  # the default of padding lies outside of small vocabularies
    hf_needed=NEEDED,
    hf_refused=dict.fromkeys(REFUSED, "it is not supported in Ling 3"),
    hf_names=replace(HF_LLAMA, gate="self_attn.g_proj", recurrent=replace(FOLDERS, decay_log=True)),
    hf_interleaved=True,
    folder_source=folder_source,
    folder_tensors=folder_tensors,
    gguf_architectures=("bailingmoe3",),
    gguf_names=replace(
        GGUF_LLAMA, gate="attn_gate", recurrent=replace(GGUF, column_vectors=True, decay_positive=True)
    ),
    gguf_interleaved=True,
)  # fmt: skip
