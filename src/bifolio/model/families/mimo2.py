"""MiMo-V2-Flash: windows with sinks and twice the key/value heads, values smaller than keys, sigmoid routing.

Folders of the Hub describe layers by `hybrid_layer_pattern` and `moe_layer_freq`, those of transformers by their kinds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from bifolio.config import RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Values, Writing
from bifolio.model.expert_fields import MLP_TYPES, SIGMOID_EXPERTS
from bifolio.model.families.family import Family
from bifolio.model.families.gemma4 import GGUF_HEADS, pattern_to_gguf, sizes_from_gguf, sizes_to_gguf, where_different
from bifolio.model.families.jamba import dense_from_gguf
from bifolio.model.fields import Field, Form, Key
from bifolio.model.gguf.rope_fields import local_rope, rope_entries
from bifolio.model.gguf.rope_fields import read_rope as gguf_rope
from bifolio.model.huggingface.rope_fields import PARAMETERS, read_rope, read_ropes, rope_object, rope_parameters
from bifolio.model.padded_values import PaddedValues, without_padding
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA
from bifolio.model.window_fields import (
    FULL,
    GGUF_WINDOWS,
    LOCAL,
    TYPES,
    WINDOW,
    Windows,
    largest_window,
    named_kinds,
    written_kinds,
)

PERIOD = 6  # every sixth layer, and the first, have no window
PATTERN, ROUTED = "hybrid_layer_pattern", "moe_layer_freq"  # 1: the layer has a window, or experts
KV_HEADS, LOCAL_KV_HEADS = "num_key_value_heads", "swa_num_key_value_heads"
SAME = {"swa_head_dim": "head_dim", "swa_v_head_dim": "v_head_dim", "swa_num_attention_heads": "num_attention_heads"}
VALUES = "self_attn.v_proj.weight", "attn_v.weight"  # ends of names in folders and GGUF files
DEFAULTS = {"rms_norm_eps": 1e-5, "head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4, WINDOW: 129,
            "attention_value_scale": 0.707, "rope_theta": 5000000.0, "partial_rotary_factor": 0.334,
            "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
            "max_position_embeddings": 131072, "bos_token_id": 1}  # fmt: skip
NEEDED = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "add_swa_attention_sink_bias": True,
          "add_full_attention_sink_bias": False}  # fmt: skip


# -- folders ----------------------------------------------------------------------------------------------------------
def marks(values: Reading, key: str) -> tuple[int, ...]:
    """0 or 1 for each layer; empty: the file has no such list."""
    found = values.json.counts(key, least=0, most=1)
    if found and len(found) != len(values.layers):
        raise values.json.wrong(key, f"a list of {len(values.layers)} numbers")
    return found


def windows(values: Reading) -> Windows:
    """`sliding_window_size`, of folders of the Hub, does not count the token itself."""
    size = values.json.count("sliding_window_size", 0, least=0)
    size = size + 1 if size else values.json.count(WINDOW)
    if values.json.get(TYPES) is not None:
        is_local = [kind == LOCAL for kind in named_kinds(values)]
    else:
        found = marks(values, PATTERN)
        is_local = [bool(mark) for mark in found] or [n > 0 and (n + 1) % PERIOD != 0 for n in values.layers]
    return tuple(size if local else None for local in is_local)


def kv_heads(values: Reading) -> tuple[int, ...]:
    json, full = values.json, values["num_kv_heads"]
    for key, other in SAME.items():
        if json.get(key) not in (None, json.get(other)):
            raise UnsupportedModelError(
                f"{json.path}: {key} is {json.get(key)}: MiMo models are supported with that of {other} only"
            )
    local = json.count(LOCAL_KV_HEADS, 2 * full)
    return where_different(tuple(full if window is None else local for window in values["layers.window"]))


def write_kv_heads(values: Writing) -> dict[str, Any]:
    """transformers doubles the heads of layers with a window."""
    for layer, window in enumerate(values["layers.window"]):
        if values.config.kv_heads(layer) != values["num_kv_heads"] * (1 if window is None else 2):
            raise values.refusal(f"{values.config.kv_heads(layer)} key/value heads in layer {layer}")
    return {}


def ropes(values: Reading) -> tuple[RopeConfig, ...]:
    own = rope_parameters(values)
    if own.get(FULL) is not None:
        return read_ropes(values)
    full = read_rope(values, own, values["head_dim"])
    return full, RopeConfig(values.json.number("swa_rope_theta", 10000.0), full.rotary_dim)


def write_ropes(values: Writing) -> dict[str, Any]:
    full, local = values.config.ropes
    share = (full.rotary_dim + 0.5) / values["head_dim"]  # readers round down
    kinds = {FULL: full, LOCAL: local}
    return {PARAMETERS: {kind: rope_object(rope) | {"partial_rotary_factor": share} for kind, rope in kinds.items()}}


def dense_layers(values: Reading) -> tuple[bool, ...]:
    if values.json.get(MLP_TYPES) is not None:
        return tuple(kind == "dense" for kind in named_kinds(values, MLP_TYPES))
    found = marks(values, ROUTED)
    return tuple(not mark for mark in found) or tuple(layer == 0 for layer in values.layers)


def write_dense(values: Writing) -> dict[str, Any]:
    return {MLP_TYPES: ["dense" if dense else "sparse" for dense in values["layers.dense"]]}


def second_in_windows(values: Values) -> tuple[int, ...]:
    """The rope of each layer."""
    return tuple(int(window is not None) for window in values["layers.window"])


# -- GGUF files -------------------------------------------------------------------------------------------------------
def full_kv_heads(values: Reading) -> int:
    """Of layers without a window; those of the first layer if all have one."""
    heads = sizes_from_gguf(values, GGUF_HEADS)
    return next((heads[n] for n, window in enumerate(values["layers.window"]) if window is None), heads[0])


def head_sizes_to_gguf(values: Writing) -> dict[str, int]:
    return {"attention.key_length": values["head_dim"], "attention.value_length": values.config.value_dim(0)}


FAMILY = Family(
    name="mimo2",
    network={"sinks": True, "sinks_in_windows": True},
    fields=(
        *SIGMOID_EXPERTS,
        Field("moe.shared_size", hf=None),
        Field("layers.dense", hf=Form(dense_layers, write_dense), gguf=Form(dense_from_gguf)),
        Field("norm_eps", hf=("rms_norm_eps", "layernorm_epsilon")),
        Field("layers.window", hf=Form(windows, lambda v: {WINDOW: largest_window(v), TYPES: written_kinds(v)}),
              gguf=Form(GGUF_WINDOWS.read, pattern_to_gguf)),
        Field("head_dim", gguf=Form(lambda v: v.header.count(".attention.key_length", least=1), head_sizes_to_gguf)),
        Field("value_size", hf="v_head_dim", gguf=Form(lambda v: v.header.count(".attention.value_length", least=1))),
        Field("value_scale", hf="attention_value_scale", gguf=Key("attention.value_scale", optional=True)),
        Field("num_kv_heads", gguf=Form(full_kv_heads, lambda v: sizes_to_gguf(
            GGUF_HEADS, [v.config.kv_heads(layer) for layer in v.layers]))),
        Field("layers.kv_heads", hf=Form(kv_heads, write_kv_heads),
              gguf=Form(lambda v: where_different(sizes_from_gguf(v, GGUF_HEADS)))),
        Field("layers.rope", hf=None, gguf=None, default=second_in_windows),
        Field("ropes", hf=Form(ropes, write_ropes),
              gguf=Form(lambda v: (gguf_rope(v), local_rope(v, gguf_rope(v).rotary_dim)), rope_entries)),
    ),
    hf_types=("mimo_v2_flash",),
    hf_class="MiMoV2FlashForCausalLM",
    hf_defaults=DEFAULTS,
    hf_implied={"qkv_bias": False, "output_bias": False, "mlp_bias": False},
    hf_needed=NEEDED,
    hf_refused={"attention_bias": "MiMo models with biases in attention are not supported",
                "n_shared_experts": "MiMo models with shared experts are not supported"},
    hf_names=replace(HF_LLAMA, sinks="self_attn.attention_sink_bias"),
    folder_source=partial(PaddedValues, name=VALUES[0]),
    folder_tensors=partial(without_padding, name=VALUES[0]),
    gguf_architectures=("mimo2",),
    gguf_names=GGUF_LLAMA,
    gguf_source=partial(PaddedValues, name=VALUES[1]),
    gguf_tensors=partial(without_padding, name=VALUES[1]),
)  # fmt: skip
