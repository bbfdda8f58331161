"""Recurrent layers in config.json and in GGUF files ↔ `RecurrentConfig` and the kinds of layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.model.decoder_fields import in_tensors
from bifolio.model.description import Reading, Values, Writing
from bifolio.model.fields import REQUIRED, Field, Form, Key
from bifolio.model.recurrent_tensors import RecurrentNames

GGUF_MAMBA = RecurrentNames(
    (("ssm_in", 5),),
    conv="ssm_conv1d",
    output="ssm_out",
    decay="ssm_a",
    bias="ssm_dt.bias",
    skip="ssm_d",
    norm="ssm_norm",
    column_vectors=True,
    grouped_norm=True,
)


def mamba_names(prefix: str) -> RecurrentNames:
    """The names in folders."""
    return RecurrentNames(
        ((f"{prefix}.in_proj", 5),),
        conv=f"{prefix}.conv1d",
        output=f"{prefix}.out_proj",
        decay=f"{prefix}.A_log",
        bias=f"{prefix}.dt_bias",
        skip=f"{prefix}.D",
        norm=f"{prefix}.norm",
        conv_axis=True,
        decay_log=True,
    )


def separate_names(
    prefix: str, inputs: tuple[str, ...], conv: str, output: str, vectors: tuple[str, str, str]
) -> RecurrentNames:
    """The names of a delta net with a matrix for each part of its inputs; `vectors`: of decay, bias and norm."""
    query, key, value = (prefix + conv.format(part) for part in "qkv")
    decay, bias, norm = (prefix + name for name in vectors)
    return RecurrentNames(
        tuple((prefix + name, 1) for name in inputs),
        conv=(query, key, value),
        output=prefix + output,
        decay=decay,
        bias=bias,
        norm=norm,
        conv_axis=True,
    )


# -- layers with attention, and with a recurrence ---------------------------------------------------------------------
def _attention_from_gguf(values: Reading) -> tuple[bool, ...]:
    return tuple(heads > 0 for heads in values.header.by_layer(".attention.head_count_kv", len(values.layers)))


def _heads_to_gguf(values: Writing) -> dict[str, Any]:
    heads = [values["num_kv_heads"] * attends for attends in values["layers.attention"]]
    return {"attention.head_count_kv": np.array(heads, np.int32)}


EITHER = Field("layers.recurrent", default=lambda v: tuple(not attends for attends in v["layers.attention"]))
# GGUF files name the key/value heads of each layer; 0: the layer has no attention.
HEADS_BY_LAYER = (
    Field("num_kv_heads", gguf=Form(lambda v: v.header.of_some_layers(".attention.head_count_kv"), _heads_to_gguf)),
    Field("layers.attention", gguf=Form(_attention_from_gguf)),
)


# -- heads with a state of their own ----------------------------------------------------------------------------------
def _value_size(values: Reading) -> int:
    inner, heads = values.header.count(".ssm.inner_size", least=1), values["recurrent.heads"]
    if inner % heads:
        raise values.header.wrong(".ssm.inner_size", f"a multiple of {heads}, the number of recurrent heads")
    return int(inner // heads)


def inner_size(values: Values) -> int:
    """Values of all heads."""
    return int(values["recurrent.heads"] * values["recurrent.value_size"])


def _channels(values: Values) -> int:
    return inner_size(values) + int(2 * values["recurrent.groups"] * values["recurrent.key_size"])


HEADS = (
    Field("recurrent.width", gguf="ssm.conv_kernel"),
    Field("recurrent.heads", gguf="ssm.time_step_rank", default=REQUIRED),
    Field("recurrent.groups", gguf="ssm.group_count", default=REQUIRED),
    Field("recurrent.key_size", gguf="ssm.state_size", default=REQUIRED),
    Field(
        "recurrent.value_size",
        gguf=Form(_value_size, lambda v: {"ssm.inner_size": inner_size(v)}),
        default=REQUIRED,
    ),
    Field("recurrent.channels", default=_channels),
)


# -- Mamba-2 ----------------------------------------------------------------------------------------------------------
def time_step_limits(*keys: str) -> Key:
    def read(values: Reading) -> tuple[float, float]:
        key = next((key for key in keys if values.json.get(key) is not None), keys[0])
        found: Any = values.json.get(key)
        if found is None:
            return 0.0, math.inf
        ends = found if isinstance(found, list | tuple) else ()
        ends = [end.get("__float__") if isinstance(end, dict) else end for end in ends]
        ends = [math.inf if end in ("Infinity", "inf") else end for end in ends]
        if len(ends) != 2 or not all(type(end) in (int, float) for end in ends):
            raise values.json.wrong(key, "a list of two numbers")
        return ends[0] + 0.0, ends[1] + 0.0

    return Key(keys, written="time_step_limit", reader=read, write=list)


def _check_bias(values: Writing) -> dict[str, Any]:
    if not values["recurrent.conv_bias"]:
        raise values.refusal("Mamba layers whose convolution has no bias")
    return {}


def _check_norm(values: Writing) -> dict[str, Any]:
    if values["recurrent.has_norm"] and values["recurrent.norm_first"]:
        raise values.refusal("Mamba layers whose norm comes before the gate")
    return {}


def head_size(values: Reading, inner: int) -> int:
    """The values of one head."""
    heads = values["recurrent.heads"]
    if inner % heads:
        raise values.json.wrong("mamba_n_heads", f"a divisor of {inner}, the number of values of all heads,")
    return int(inner // heads)


def _value_size_from_hf(values: Reading) -> int:
    return head_size(values, values.json.count("mamba_expand", 2) * values["hidden_size"])


def _write_inner_size(values: Writing) -> dict[str, int]:
    return {"mamba_expand": inner_size(values) // values["hidden_size"], "mamba_d_head": values["recurrent.value_size"]}


MAMBA = (
    *HEADS,
    Field("recurrent.kind", default="mamba"),
    Field("recurrent.width", hf=Key("mamba_d_conv", default=4)),
    Field("recurrent.heads", hf=Key("mamba_n_heads", default=128)),
    Field("recurrent.groups", hf=Key("mamba_n_groups", default=1)),
    Field("recurrent.key_size", hf=Key("mamba_d_state", default=256)),
    Field("recurrent.value_size", hf=Form(_value_size_from_hf, _write_inner_size)),
    Field(
        "recurrent.conv_bias",
        hf=Key("mamba_conv_bias", default=True),
        gguf=Form(in_tensors("ssm_conv1d.bias").read, _check_bias),
    ),
    Field("recurrent.projection_bias", hf="mamba_proj_bias"),
    Field("recurrent.has_norm", gguf=in_tensors("ssm_norm.weight")),
    Field("recurrent.norm_first", hf=None, gguf=Form(lambda v: False, _check_norm), default=False),
    Field("recurrent.norm_groups", default=lambda v: v["recurrent.groups"]),
    Field("recurrent.dt_limits", hf=time_step_limits("time_step_limit"), optional=True),
)


# -- Mamba ------------------------------------------------------------------------------------------------------------
def selective_names(prefix: str = "") -> RecurrentNames:
    """The names in folders, or without a prefix those in GGUF files; the caller adds those of the parameters."""
    if not prefix:
        return RecurrentNames((("ssm_in", 2),), conv="ssm_conv1d", output="ssm_out", decay="ssm_a", skip="ssm_d")
    return replace(mamba_names(prefix), input=((f"{prefix}.in_proj", 2),), bias="", norm="")


def _channels_from_hf(values: Reading) -> int:
    return values.json.count("mamba_expand", 2, most=64) * int(values["hidden_size"])


def _write_channels(values: Writing) -> dict[str, int]:
    return {"mamba_expand": values["recurrent.channels"] // values["hidden_size"]}


SELECTIVE = (
    Field("recurrent.kind", default="selective"),
    Field("recurrent.width", hf=Key("mamba_d_conv", default=4), gguf="ssm.conv_kernel"),
    Field("recurrent.channels", hf=Form(_channels_from_hf, _write_channels), gguf="ssm.inner_size", default=REQUIRED),
    Field("recurrent.heads", default=1),
    Field("recurrent.groups", default=1),
    Field("recurrent.key_size", hf=Key("mamba_d_state", default=16), gguf="ssm.state_size", default=REQUIRED),
    Field("recurrent.value_size", default=lambda v: v["recurrent.channels"]),
    Field(
        "recurrent.conv_bias",
        hf=Key("mamba_conv_bias", default=True),
        gguf=Form(in_tensors("ssm_conv1d.bias").read, _check_bias),
    ),
    Field("recurrent.has_norm", default=False),
    Field("recurrent.step_rank", gguf="ssm.time_step_rank", default=REQUIRED),
)
