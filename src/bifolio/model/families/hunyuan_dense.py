"""Hunyuan (dense): Llama with norms on each query and key head after rope, whose base `alpha` stretches."""

from __future__ import annotations

from dataclasses import replace

from bifolio.config import RopeConfig
from bifolio.model.description import Reading
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.huggingface import rope_fields
from bifolio.model.tensor_names import HF_LLAMA

NETWORK = {"qk_norm": True, "qk_norm_after_rope": True}
HF_NAMES = replace(HF_LLAMA, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")


def read_ropes(values: Reading) -> tuple[RopeConfig, ...]:
    own, dim = rope_fields.rope_parameters(values), values["head_dim"]
    alpha = own.number("alpha", 0.0)
    if not alpha:
        return rope_fields.read_ropes(values)
    if not 0 < alpha < 1e9:
        raise own.wrong("alpha", "a positive number")
    plain = values.json.object("no parameters").with_defaults({"rope_theta": own.get("rope_theta")})
    rope = rope_fields.read_rope(values, plain, dim)
    return (replace(rope, theta=rope.theta * alpha ** (dim / max(dim - 2, 1))),)


ROPES = Field("ropes", hf=Form(read_ropes, rope_fields.written_ropes))
FAMILY = Family(
    name="hunyuan_dense",
    network=NETWORK,
    fields=(ROPES,),
    hf_types=("hunyuan_v1_dense",),
    hf_class="HunYuanDenseV1ForCausalLM",
    hf_defaults={"rms_norm_eps": 1e-5},
    hf_always=("attention_bias",),
    hf_names=HF_NAMES,
    gguf_architectures=("hunyuan-dense",),
)
