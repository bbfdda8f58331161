"""Mamba and Falcon-Mamba: selective recurrent layers alone. Falcon-Mamba norms the parameters of its layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from bifolio.model.description import Reading, Values, Writing
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form, Key
from bifolio.model.recurrent_fields import SELECTIVE, selective_names
from bifolio.model.selective_tensors import SelectiveNames
from bifolio.model.tensor_names import GGUF_LLAMA, TensorNames

FALCON, LONGEST = "falcon_mamba", 1 << 20  # tokens of a context, which nothing limits
NETWORK: dict[str, Any] = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 1, "ropes": (),
                           "layers.rope": ()}  # fmt: skip  # of attention and MLPs, which no layer has
HF_NAMES = TensorNames(
    embedding="backbone.embeddings",
    layer="backbone.layers.{}.",
    attention_norm="norm",
    qkv=(),
    output="",
    mlp_norm="",
    up=(),
    down="",
    final_norm="backbone.norm_f",
    head="lm_head",
)


def of_layers(value: bool) -> Any:
    def of_all(values: Values) -> tuple[bool, ...]:
        return (value,) * len(values.layers)

    return of_all


ALONE = (  # recurrent layers and nothing else
    Field("layers.attention", default=of_layers(False)),
    Field("layers.recurrent", default=of_layers(True)),
    Field("layers.mlp", default=of_layers(False)),
    Field("max_position", hf=Key("max_position_embeddings", default=LONGEST, optional=True)),
    Field("norm_eps", hf=Key("layer_norm_epsilon", default=1e-5)),
    Field("tie_embeddings", default=True),
)


def channels(values: Reading) -> int:
    usual = int(values.json.number("expand", 2.0) * values["hidden_size"])
    return values.json.count("intermediate_size", usual)


def write_channels(values: Writing) -> dict[str, Any]:
    size = values["recurrent.channels"]
    return {"intermediate_size": size, "expand": max(size // values["hidden_size"], 1)}


def step_rank(values: Reading) -> int:
    found = values.json.get("time_step_rank")
    return math.ceil(values["hidden_size"] / 16) if found in (None, "auto") else values.json.count("time_step_rank")


def write_norms(values: Writing) -> dict[str, Any]:
    if values["recurrent.step_norms"] == "none":
        return {}
    return {"architectures": ["FalconMambaForCausalLM"], "model_type": FALCON}


FAMILY = Family(
    name="mamba",
    network=NETWORK,
    fields=(
        *SELECTIVE,
        *ALONE,
        Field("recurrent.width", hf=Key("conv_kernel", default=4)),
        Field("recurrent.channels", hf=Form(channels, write_channels)),
        Field("recurrent.key_size", hf="state_size"),
        Field("recurrent.conv_bias", hf="use_conv_bias"),
        Field("recurrent.projection_bias", hf="use_bias"),
        Field("recurrent.step_rank", hf=Key("time_step_rank", reader=step_rank)),
        Field(
            "recurrent.step_norms",
            hf=Form(lambda v: "plain" if v.json.get("model_type") == FALCON else "none", write_norms),
            gguf=Form(
                lambda v: "plain" if v.header.flag(".ssm.dt_b_c_rms", False) else "none",
                lambda v: {"ssm.dt_b_c_rms": v["recurrent.step_norms"] != "none"},
            ),
        ),
        Field(
            "recurrent.step_norm_eps",
            hf=Key("mixer_rms_eps", default=1e-6, optional=True),
            gguf=Form(lambda v: v["norm_eps"] if v["recurrent.step_norms"] != "none" else 1e-6),
        ),
    ),
    hf_types=("mamba", FALCON),
    hf_class="MambaForCausalLM",
    hf_defaults={"state_size": 16, "use_conv_bias": True, "bos_token_id": 0, "eos_token_id": 0},
    hf_implied={"qkv_bias": False, "output_bias": False, "mlp_bias": False, "layers.window": ()},
    hf_names=replace(
        HF_NAMES,
        recurrent=replace(selective_names("mixer"), selective=SelectiveNames("mixer.x_proj", "mixer.dt_proj")),
    ),
    gguf_architectures=("mamba",),
    gguf_written={"attention.head_count": 0, "feed_forward_length": 0},
    gguf_names=replace(GGUF_LLAMA, recurrent=replace(selective_names(), selective=SelectiveNames("ssm_x", "ssm_dt"))),
)  # fmt: skip
