"""Command A+ (Cohere 2 with experts): attention and experts side by side, windows and rope in three of four layers.

The first layers may have plain MLPs of their own width; with whole contexts they have rope, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bifolio.errors import UnsupportedModelError
from bifolio.model.decoder_fields import or_one
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import EXPERTS, LEADING, dense_by_type, read_scoring, scoring_by
from bifolio.model.families.family import Family
from bifolio.model.fields import REQUIRED, Field, Form, Key
from bifolio.model.window_fields import BY_TYPE, LOCAL, TYPES, named_kinds, of_layers

RMS_EPS, LAYER_EPS = "rms_norm_eps", "layer_norm_eps"
DENSE_WIDTH, DENSE_PERIOD, PERIOD = (
    "prefix_dense_intermediate_size", "prefix_dense_sliding_window_pattern", "sliding_window_pattern",
)  # fmt: skip
CHOICE, JOINS = "expert_selection_fn", "shared_expert_combination_strategy"
SIGMOID = 2  # the scores of experts of GGUF files that do not name them


# -- norms ------------------------------------------------------------------------------------------------------------
def norm_kind(values: Reading) -> str:
    return "layer" if values.json.get(RMS_EPS) is None else "rms"


def norm_eps(values: Reading) -> float:
    return values.json.number(RMS_EPS) if values["norm"] == "rms" else values.json.number(LAYER_EPS, 1e-5)


def write_norm_eps(values: Writing) -> dict[str, float | None]:
    is_rms = values["norm"] == "rms"
    return {RMS_EPS: values["norm_eps"]} if is_rms else {RMS_EPS: None, LAYER_EPS: values["norm_eps"]}


def norm_from_gguf(values: Reading) -> str:
    return "rms" if values.header.has(".attention.layer_norm_rms_epsilon") else "layer"


# -- kinds of layers --------------------------------------------------------------------------------------------------
def windows(values: Reading) -> tuple[int | None, ...]:
    """By name, or by one period in the layers with plain MLPs and another in those behind them."""
    json = values.json
    if json.get(TYPES) is not None:
        return of_layers(values, [kind == LOCAL for kind in named_kinds(values)])
    first, rest = json.count(DENSE_PERIOD, 1), json.count(PERIOD, 4)
    plain = json.count("first_k_dense_replace", 0, least=0)
    places = [(layer + 1) % first if layer < plain else (layer - plain + 1) % rest for layer in values.layers]
    return of_layers(values, [place != 0 for place in places])


def rotated(values: Reading) -> tuple[int | None, ...]:
    """Layers with a window have rope, and those with a plain MLP where none of these has a window by default."""
    forced = values.side == "gguf" or values.json.count(DENSE_PERIOD, 1) == 1
    local, plain = values["layers.window"], values["layers.dense"]
    none = (None,) * len(values.layers)
    pairs = zip(local or none, plain or none, strict=True)
    return tuple(0 if window is not None or (dense and forced) else None for window, dense in pairs)


def is_forced(values: Writing) -> bool:
    """Whether layers with a plain MLP and no window have rope; a refusal where they differ, or others have it."""
    found = set()
    for layer in values.config.layers:
        if layer.window is not None or not layer.dense:
            if (layer.window is None) != (layer.rope is None):
                raise values.refusal("rope in other layers than those with windows")
        else:
            found.add(layer.rope is not None)
    if len(found) > 1:
        raise values.refusal("rope in some of the layers with a plain MLP and no window")
    return found != {False}


def write_rotated(values: Writing) -> dict[str, int]:
    return {DENSE_PERIOD: 1 if is_forced(values) else 2}


def check_rotated(values: Writing) -> dict[str, Any]:
    if not is_forced(values):
        raise values.refusal("layers with a plain MLP, no window and no rope")
    return {}


# -- experts ----------------------------------------------------------------------------------------------------------
def scoring(values: Reading) -> str:
    found = values.json.text(CHOICE, "softmax")
    if found not in ("softmax", "sigmoid"):
        raise UnsupportedModelError(f"the choice of experts by {found!r} ({CHOICE}) is not supported")
    return found


def adds_up(values: Reading) -> bool:
    """The softmax is over the chosen experts alone."""
    return values["moe.scoring"] == "softmax" or values.json.flag("norm_topk_prob", True)


def write_sum(values: Writing) -> dict[str, bool]:
    if values["moe.scoring"] == "softmax" and not values["moe.renormalise"]:
        raise values.refusal("a softmax over all experts")
    return {"norm_topk_prob": values["moe.renormalise"]}


def is_mean(values: Reading) -> bool:
    found = values.json.text(JOINS, "average")
    if found not in ("average", "sum"):
        raise UnsupportedModelError(f"the combination {found!r} ({JOINS}) of shared experts is not supported")
    return found == "average" and values["moe.shared_size"] > 0


def write_mean(values: Writing) -> dict[str, str]:
    return {JOINS: "average" if values["moe.shared_mean"] or not values["moe.shared_size"] else "sum"}


def check_mean(values: Writing) -> dict[str, Any]:
    if values["moe.shared_size"] and not values["moe.shared_mean"]:
        raise values.refusal("shared experts that are added")
    return {}


def shared_size(values: Reading) -> int:
    return int(values["moe.expert_size"]) * values.json.count("num_shared_experts", 0, least=0)


def dense_width(values: Reading) -> int:
    return values.json.count(DENSE_WIDTH, values["moe.expert_size"])


def variant(raw: Mapping[str, Any]) -> str:
    """The type of the text part of a model of text and images."""
    inner = raw.get("text_config")
    named = inner.get("model_type") if isinstance(inner, Mapping) else None
    return "cohere2" if raw.get("model_type") == "cohere2_vision" and named == "cohere2" else "cohere2_moe"


FAMILY = Family(
    name="cohere2_moe",
    network={"norm_bias": False, "parallel_block": True},
    fields=(
        *EXPERTS,
        Field("norm", hf=Form(norm_kind), gguf=Form(norm_from_gguf)),
        Field("norm_eps", hf=Form(norm_eps, write_norm_eps)),
        Field("logit_scale", hf="logit_scale", gguf=Key("logit_scale", read=or_one)),
        Field("tie_embeddings", hf=Key("tie_word_embeddings", default=True)),
        Field("layers.window", hf=Form(windows, BY_TYPE.write)),
        Field("layers.rope", hf=Form(rotated, write_rotated), gguf=Form(rotated, check_rotated)),
        LEADING,
        Field("layers.dense", hf=dense_by_type(0)),
        Field("intermediate_size", hf=Form(dense_width, lambda v: {DENSE_WIDTH: v["intermediate_size"]})),
        Field("moe.num_experts", hf="num_experts", default=REQUIRED),
        Field("moe.expert_size", hf="intermediate_size", default=REQUIRED),
        Field("moe.scoring", hf=Form(scoring, lambda v: {CHOICE: v["moe.scoring"]}),
              gguf=scoring_by(lambda v: read_scoring(v, SIGMOID))),
        Field("moe.renormalise", hf=Form(adds_up, write_sum)),
        Field("moe.shared_size",
              hf=Form(shared_size, lambda v: {"num_shared_experts": v["moe.shared_size"] // v["moe.expert_size"]})),
        Field("moe.shared_mean", hf=Form(is_mean, write_mean),
              gguf=Form(lambda v: v["moe.shared_size"] > 0, check_mean)),
    ),
    hf_types=("cohere2_moe", "cohere2_vision"),
    hf_variant=variant,
    hf_class="Cohere2MoeForCausalLM",
    hf_defaults={"logit_scale": 0.0625, "sliding_window": 4096, "num_experts": 8, "num_experts_per_tok": 2,
                 "head_dim": 128, "max_position_embeddings": 8192, "bos_token_id": 5, "eos_token_id": 255001},
    hf_always=("attention_bias", "tie_word_embeddings"),
    hf_refused={"mlp_bias": "Cohere 2 with biases in its MLPs is not supported",
                "layer_norm_bias": "Cohere 2 with biases in its norms is not supported",
                "use_qk_norm": "Cohere 2 with norms of queries and keys is not supported"},
    hf_needed={"hidden_act": "silu", "use_parallel_block": True},
    hf_text_part=True,
    hf_interleaved=True,
    gguf_architectures=("cohere2moe",),
    gguf_written={"rope.scaling.type": "none"},
    gguf_interleaved=True,
)  # fmt: skip
