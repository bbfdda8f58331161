"""DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash: attention over cached latents (MLA), shared experts, groups of experts.

In V3 and GLM a bias changes the choice of experts, and sigmoids weigh them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import EXPERTS, first_layers, leading_dense, of_expert_size, read_scoring, scoring_by
from bifolio.model.export import NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.fields import REQUIRED, Field, Form, Key
from bifolio.model.gguf.rope_fields import read_rope, rope_entries
from bifolio.model.huggingface import rope_fields
from bifolio.model.huggingface.rope_fields import rope_parameters, scaling_object
from bifolio.model.latent_names import HF_LATENT
from bifolio.model.model_file import TensorSource
from bifolio.model.next_token_names import GGUF_NEXT_TOKEN, HF_NEXT_TOKEN
from bifolio.model.window_fields import named_kinds
from bifolio.quant.tensor import QuantizedTensor

GREEDY, GROUPS, BIASED = "greedy", "group_limited_greedy", "noaux_tc"  # choices of experts; the last is DeepSeek-V3's
GLM, KIMI = "glm4_moe_lite", ("kimi_k2", "kimi_k25")
INDEXED = ("deepseek_v32", "glm_moe_dsa")  # families of their own
DENSE = "first_k_dense_replace"
KEY_SIZE, LOG_MULTIPLIER = ".attention.key_length_mla", ".rope.scaling.yarn_log_multiplier"
KV_UP = "self_attn.kv_b_proj"  # of folders: key and value projections, head by head


# -- the factor of scores ---------------------------------------------------------------------------------------------
def score_scale(values: Reading, factor: float, multiplier: float) -> float:
    """The factor of scores; yarn with `mscale_all_dim` enlarges it."""
    larger = 1 + 0.1 * multiplier * math.log(factor) if multiplier and factor > 1 else 1.0
    return float(larger**2 / math.sqrt(values["mla.rope_size"] + values["mla.nope_size"]))


def enlargement(values: Writing) -> float:
    """The factor of scores by yarn: mscale_all_dim, or 0."""
    factor = values.config.ropes[0].factor
    if factor <= 1:
        return 0.0
    larger = math.sqrt(values.config.scale * math.sqrt(values["mla.rope_size"] + values["mla.nope_size"]))
    return round((larger - 1) / (0.1 * math.log(factor)), 6)


def scale_from_hf(values: Reading) -> float:
    own = rope_parameters(values)
    return score_scale(values, own.number("factor", 1.0), own.number("mscale_all_dim", 0.0))


def scale_from_gguf(values: Reading) -> float:
    return score_scale(values, values["ropes"][0].factor, values.header.number(LOG_MULTIPLIER, 0.0) / 0.1)


def ropes_from_gguf(values: Reading) -> tuple[RopeConfig, ...]:
    """Where scores are enlarged, queries and keys are not."""
    rope = read_rope(values)
    return (replace(rope, attention_factor=1.0) if values.header.number(LOG_MULTIPLIER, 0.0) else rope,)


def ropes_to_gguf(values: Writing) -> dict[str, Any]:
    if not (multiplier := enlargement(values)):
        return rope_entries(values)
    if not math.isclose(values.config.ropes[0].attention_factor, 1.0, rel_tol=1e-6):
        raise values.refusal("yarn that enlarges scores, queries and keys at once")
    return {**rope_entries(values), LOG_MULTIPLIER[1:]: 0.1 * multiplier, "rope.scaling.attn_factor": 1.0}


def ropes_to_hf(values: Writing) -> dict[str, Any]:
    rope, multiplier = values.config.ropes[0], enlargement(values)
    scaling = scaling_object(rope)
    if scaling is not None and multiplier:
        scaling |= {"mscale": multiplier, "mscale_all_dim": multiplier}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


# -- attention over latents -------------------------------------------------------------------------------------------
def cached_size(values: Reading) -> int:
    return int(values["mla.rope_size"] + values["mla.latent_size"])


def query_rank_from_gguf(values: Reading) -> int:
    has_rank = values.header.has_tensor("blk.0.attn_q_a.weight")
    return values.header.count(".attention.q_lora_rank", 0) if has_rank else 0


LATENTS = (
    Field(
        "head_dim",
        hf=Form(cached_size, lambda v: {"head_dim": v["mla.rope_size"]}),
    ),
    Field(
        "num_kv_heads",
        hf=Form(lambda v: 1, lambda v: {"num_key_value_heads": v["num_heads"]}),
        gguf=Key("attention.head_count_kv", reader=lambda v: 1),
    ),
    Field(
        "mla.latent_size",
        hf="kv_lora_rank",
        gguf=Form(
            lambda v: v.header.count(".attention.kv_lora_rank", least=1),
            lambda v: dict.fromkeys(("attention.kv_lora_rank", "attention.value_length"), v["mla.latent_size"]),
        ),
        default=REQUIRED,
    ),
    Field("mla.rope_size", hf="qk_rope_head_dim", gguf="rope.dimension_count"),
    Field(
        "mla.nope_size",
        hf="qk_nope_head_dim",
        gguf=Form(
            lambda v: v.header.count(KEY_SIZE, least=v["mla.rope_size"] + 1) - v["mla.rope_size"],
            lambda v: {KEY_SIZE[1:]: v["mla.nope_size"] + v["mla.rope_size"]},
        ),
    ),
    Field("mla.value_size", hf="v_head_dim", gguf="attention.value_length_mla"),
    Field(
        "mla.query_rank",
        hf=Key("q_lora_rank", write=lambda rank: rank or None),
        gguf=Key("attention.q_lora_rank", reader=query_rank_from_gguf, optional=True),
    ),
    Field(
        "ropes",
        hf=Form(lambda v: (rope_fields.read_rope(v, rope_parameters(v), v["mla.rope_size"]),), ropes_to_hf),
        gguf=Form(ropes_from_gguf, ropes_to_gguf),
    ),
    Field("attention_scale", hf=Form(scale_from_hf), gguf=Form(scale_from_gguf)),
)


# -- experts ----------------------------------------------------------------------------------------------------------
def method(values: Reading) -> str:
    """The choice of experts."""
    is_biased = values.json.get("model_type") in ("deepseek_v3", *KIMI, GLM, *INDEXED)
    found = values.json.text("topk_method", BIASED if is_biased else GREEDY)
    if found not in (GREEDY, GROUPS, BIASED):
        raise UnsupportedModelError(f"the routing {found!r} is not supported; supported: {GREEDY}, {GROUPS}, {BIASED}")
    return found


def write_method(values: Writing) -> dict[str, Any]:
    """DeepSeek-V3 has a bias and sigmoids, V2 neither, and its weights do not add up to 1."""
    if (values["moe.scoring"] == "sigmoid") != values["moe.selection_bias"]:
        raise values.refusal(f"moe.scoring = {values['moe.scoring']!r}")
    if values["moe.renormalise"] and not values["moe.selection_bias"]:
        raise values.refusal("chosen experts that add up to 1, and no bias")
    if values["moe.selection_bias"]:
        third = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "rope_interleave": True}
        return {**third, "topk_method": BIASED}
    return {"topk_method": GREEDY if values["moe.num_groups"] == 1 else GROUPS}


def groups(key: str) -> Key:
    """A number of groups; 1 where experts are chosen without them."""
    return Key(key, reader=lambda v: 1 if method(v) == GREEDY else v.json.count(key, 1, least=0) or 1)


def dense_layers(values: Reading) -> tuple[bool, ...]:
    if values.json.get("mlp_layer_types") is not None:
        return tuple(kind == "dense" for kind in named_kinds(values, "mlp_layer_types"))
    usual = 1 if values.json.get("model_type") == GLM else 0
    return first_layers(values, values.json.count(DENSE, usual, least=0))


def scoring_from_gguf(values: Reading) -> str:
    """Sigmoids choose the experts of files with a bias that do not name the function."""
    is_sigmoid = values["moe.selection_bias"] and not values.header.has(".expert_gating_func")
    return "sigmoid" if is_sigmoid else read_scoring(values)


CHOICE = (
    *EXPERTS,
    Field(
        "moe.num_experts",
        hf=("n_routed_experts", "num_experts", "num_local_experts"),
        gguf=Key("expert_count", default=0),  # Youtu-LLM has none
    ),
    Field(
        "moe.selection_bias",
        hf=Form(lambda v: method(v) == BIASED, write_method),
        gguf=Form(lambda v: "exp_probs_b.bias" in v.header.in_layers),
    ),
    Field(
        "moe.scoring",
        hf=Key("scoring_func", reader=lambda v: "sigmoid" if v["moe.selection_bias"] else "softmax"),
        gguf=scoring_by(scoring_from_gguf),
    ),
    Field(
        "moe.renormalise",
        hf=Key("norm_topk_prob", reader=lambda v: v["moe.selection_bias"] and v.json.flag("norm_topk_prob", True)),
    ),
    Field("moe.scale", hf="routed_scaling_factor"),
    Field("moe.num_groups", hf=groups("n_group")),
    Field("moe.top_groups", hf=groups("topk_group")),
    Field("moe.group_best", default=lambda v: 2 if v["moe.selection_bias"] else 1),
    Field("moe.shared_size", hf=of_expert_size("n_shared_experts")),
    Field("layers.dense", hf=Form(dense_layers, lambda v: {DENSE: leading_dense(v)})),
)


@dataclass(frozen=True, slots=True)
class SplitByHead:
    """A folder's tensors, with the projections of keys and values by head."""

    source: TensorSource
    config: ModelConfig

    def has(self, name: str) -> bool:
        return self.source.has(name)

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        mla = self.config.mla
        role = next((role for role in (HF_LATENT.key_up, HF_LATENT.value_up) if f"{role}.weight" in name), None)
        if mla is None or role is None:
            return self.source.view(name, shape)
        heads, rows = self.config.num_heads, mla.nope_size + mla.value_size
        joined = self.source.view(name.replace(role, KV_UP), (heads * rows, mla.latent_size))
        by_head = np.arange(heads * rows).reshape(heads, rows)
        if role == HF_LATENT.value_up:
            return joined.select_rows(by_head[:, mla.nope_size :].reshape(-1)).reshape(*shape)
        keys = joined.select_rows(by_head[:, : mla.nope_size].reshape(-1)).dequantize()
        return QuantizedTensor.from_array(np.ascontiguousarray(keys.reshape(heads, -1, mla.latent_size).swapaxes(1, 2)))


def joined_by_head(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    """The reverse of `SplitByHead`."""
    keys: NamedTensor | None = None
    for tensor in tensors:
        if HF_LATENT.key_up in tensor.name:
            keys = tensor
        elif HF_LATENT.value_up in tensor.name and keys is not None:
            parts = [keys.rearranged().dequantize().swapaxes(1, 2), tensor.rearranged().dequantize()]
            rows = np.concatenate(parts, axis=1)
            joined = QuantizedTensor.from_array(rows.reshape(-1, rows.shape[-1]))
            yield NamedTensor(tensor.name.replace(HF_LATENT.value_up, KV_UP), joined, "matrix")
        else:
            yield tensor


REFUSED = {".attention.temperature_scale": "queries that grow with the position are not supported with latents"}

FAMILY = Family(
    name="deepseek2",
    fields=(*LATENTS, *CHOICE),
    hf_types=("deepseek_v2", "deepseek_v3", *KIMI, GLM),
    hf_class="DeepseekV2ForCausalLM",
    hf_refused={"attention_bias": "DeepSeek-V2 with biases in attention is not supported"},
    hf_needed={"rope_interleave": True},
    hf_text_part=True,
    hf_interleaved=True,
    folder_source=SplitByHead,
    folder_tensors=joined_by_head,
    folder_family=lambda config: "youtu" if config.moe is None else config.architecture,
    gguf_architectures=("deepseek2",),
    gguf_refused=REFUSED,
    gguf_interleaved=True,
    hf_next_token=HF_NEXT_TOKEN,
    gguf_next_token=GGUF_NEXT_TOKEN,
)
