"""Experts in config.json and in GGUF files ↔ `MoeConfig`: the fields that most families with experts share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Writing
from bifolio.model.fields import REQUIRED, Field, Form, Key
from bifolio.model.window_fields import named_kinds

MLP_TYPES = "mlp_layer_types"
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3  # scores of experts


# -- GGUF files -------------------------------------------------------------------------------------------------------
def _first_layer(values: Reading) -> str:
    """The first layer with experts; hybrids have them in some of the layers."""
    header, name = values.header, "ffn_down_exps.weight"
    count = header.count(".block_count")
    first = min(header.count(".leading_dense_block_count", 0), count - 1)
    found = next((layer for layer in range(first, count) if header.has_tensor(f"blk.{layer}.{name}")), first)
    header.shape(f"blk.{found}.{name}", 3)
    return f"blk.{found}."


def _in_first_layer(name: str) -> Form:
    return Form(lambda v: v.header.has_tensor(_first_layer(v) + name))


def _expert_size(values: Reading) -> int:
    stored = values.header.shape(_first_layer(values) + "ffn_down_exps.weight", 3)[-1]
    return values.header.count(".expert_feed_forward_length", stored)


def _shared_size(values: Reading) -> int:
    name = _first_layer(values) + "ffn_up_shexp.weight"
    return values.header.shape(name)[0] if values.header.has_tensor(name) else 0


def _write_shared_size(values: Writing) -> dict[str, int]:
    size, count = values["moe.shared_size"], values["moe.shared_size"] // values["moe.expert_size"]
    return {"expert_shared_feed_forward_length": size, "expert_shared_count": max(1, count)} if size else {}


def read_scoring(values: Reading, default: int = _SOFTMAX) -> str:
    kind = values.header.count(".expert_gating_func", default)
    if kind > _SOFTMAX_OF_CHOSEN:
        raise UnsupportedModelError(
            f"{values.header.path}: the scores of experts are of the kind {kind}, which is not known"
        )
    return "sigmoid" if kind == _SIGMOID else "softmax"


def scoring_by(reader: Callable[[Reading], str]) -> Key:
    return Key("expert_gating_func", reader=reader, write=lambda kind: _SOFTMAX if kind == "softmax" else _SIGMOID)


def _leading_from_gguf(values: Reading) -> tuple[bool, ...]:
    return first_layers(values, values.header.count(".leading_dense_block_count", 0))


def _write_leading(values: Writing) -> dict[str, int]:
    first = leading_dense(values)
    return {"leading_dense_block_count": first} if first else {}


def _always_leading(values: Writing) -> dict[str, int]:
    return {"leading_dense_block_count": leading_dense(values)}


def _write_sum(values: Writing) -> dict[str, bool]:
    if not values["moe.renormalise"]:
        raise values.refusal("chosen experts that do not add up to 1")
    return {"expert_weights_norm": True}


def _write_no_sum(values: Writing) -> dict[str, bool]:
    if values["moe.renormalise"]:
        raise values.refusal("chosen experts that add up to 1")
    return {"expert_weights_norm": False}


ADDS_UP = Form(lambda v: True, _write_sum)  # the architecture implies that the weights of chosen experts add up to 1
AS_THEY_ARE = Form(lambda v: False, _write_no_sum)  # the architecture implies that they are used as they are


# -- both -------------------------------------------------------------------------------------------------------------
def leading_dense(values: Writing) -> int:
    """The number of layers with a plain MLP, which are the first."""
    dense = values["layers.dense"]
    if sorted(dense, reverse=True) != list(dense):
        layers = tuple(layer for layer in values.layers if dense[layer])
        raise values.refusal(f"plain MLPs in the layers {layers}", "plain MLPs in the first")
    return sum(dense)


def first_layers(values: Reading, count: int) -> tuple[bool, ...]:
    return tuple(layer < count for layer in values.layers) if count and values["moe.num_experts"] else ()


def leading(key: str, default: int = 0) -> Form:
    """A number of layers with plain MLPs before those with experts, in config.json."""
    return Form(lambda v: first_layers(v, v.json.count(key, default, least=0)), lambda v: {key: leading_dense(v)})


def dense_by_type(default: int) -> Form:
    """The kinds of MLPs of all layers, or a number of layers with plain MLPs, in config.json."""

    def read(values: Reading) -> tuple[bool, ...]:
        if values.json.get(MLP_TYPES) is None:
            return first_layers(values, values.json.count("first_k_dense_replace", default, least=0))
        return tuple(kind == "dense" for kind in named_kinds(values, MLP_TYPES))

    return Form(read, lambda v: {MLP_TYPES: ["dense" if plain else "sparse" for plain in v["layers.dense"]]})


def of_expert_size(key: str, default: int | None = 0) -> Form:
    """The width of the shared MLP as a number of experts, in config.json."""
    return Form(
        lambda v: v["moe.expert_size"] * v.json.count(key, default, least=0),
        lambda v: {key: v["moe.shared_size"] // v["moe.expert_size"]},
    )


def _sparse_steps(values: Reading) -> tuple[bool, ...]:
    step, plain = values.json.count("decoder_sparse_step", 1), values.json.counts("mlp_only_layers", least=0)
    return tuple(layer in plain or (layer + 1) % step != 0 for layer in values.layers)


def _write_sparse_steps(values: Writing) -> dict[str, Any]:
    plain = [layer for layer in values.layers if values["layers.dense"][layer]]
    return {"decoder_sparse_step": 1, "mlp_only_layers": plain}


SPARSE_STEPS = Field("layers.dense", hf=Form(_sparse_steps, _write_sparse_steps))

EXPERTS = (
    Field(
        "moe.num_experts",
        hf=("num_experts", "num_local_experts", "n_routed_experts"),
        gguf="expert_count",
        default=REQUIRED,
    ),
    Field("moe.top_k", hf="num_experts_per_tok", gguf="expert_used_count"),
    Field("moe.expert_size", hf="moe_intermediate_size", gguf=Key("expert_feed_forward_length", reader=_expert_size)),
    Field("moe.scoring", gguf=scoring_by(read_scoring)),
    Field("moe.renormalise", gguf="expert_weights_norm"),
    Field("moe.scale", gguf=Key("expert_weights_scale", read=lambda scale: scale or 1.0)),
    Field("moe.selection_bias", gguf=_in_first_layer("exp_probs_b.bias")),
    Field("moe.num_groups", gguf=Key("expert_group_count", optional=True)),
    Field(
        "moe.top_groups",
        gguf=Form(
            lambda v: v.header.count(".expert_group_used_count", 1),
            lambda v: {"expert_group_used_count": v["moe.top_groups"]} if v["moe.num_groups"] > 1 else {},
        ),
    ),
    Field("moe.router_bias", gguf=_in_first_layer("ffn_gate_inp.bias")),
    Field("moe.expert_bias", gguf=_in_first_layer("ffn_down_exps.bias")),
    Field("moe.shared_size", gguf=Form(_shared_size, _write_shared_size)),
    Field("layers.dense", gguf=Form(_leading_from_gguf, _write_leading)),
)
# Of architectures whose readers ask for the number also where it is 0.
LEADING = Field("layers.dense", gguf=Form(_leading_from_gguf, _always_leading))
# Experts as wide as the MLPs of the model, whose weights add up to 1.
ADD_UP = Field("moe.renormalise", hf=None, gguf=ADDS_UP, default=True)
WIDE = Field("moe.expert_size", hf=Key("intermediate_size", reader=lambda v: v["intermediate_size"]))
NO_EXPERTS = Field("moe.num_experts", hf=None, default=0)  # in folders
OWN_EXPERTS = Field("moe.num_experts", hf=("num_experts", "num_local_experts", "n_routed_experts"))
LOCAL_EXPERTS = Field("moe.num_experts", hf=("num_local_experts", "num_experts", "n_routed_experts"))

# Experts that are chosen by sigmoids and a bias, as in DeepSeek-V3; two experts rank a group.
SIGMOID_EXPERTS = (
    *EXPERTS,
    Field("moe.num_experts", hf=("n_routed_experts", "num_experts", "num_local_experts")),
    Field("moe.scoring", gguf=scoring_by(lambda v: read_scoring(v, _SIGMOID)), default="sigmoid"),
    Field("moe.renormalise", hf=Key("norm_topk_prob", default=True)),
    Field("moe.scale", hf="routed_scaling_factor"),
    Field("moe.selection_bias", default=True),
    Field("moe.num_groups", hf=Key("n_group", read=lambda count: count or 1)),
    Field("moe.top_groups", hf=Key("topk_group", default=lambda v: v["moe.num_groups"])),
    Field("moe.group_best", default=2),
    Field("moe.shared_size", hf=of_expert_size("n_shared_experts")),
    Field("layers.dense", hf=leading("first_k_dense_replace")),
)
