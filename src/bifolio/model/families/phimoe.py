"""Phi-3.5-MoE: layer norms, and two experts of each token, weighed among close logits (sparse mixing)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import RopeConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import EXPERTS, LOCAL_EXPERTS, WIDE
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form, Key
from bifolio.model.huggingface.rope_fields import read_ropes, rope_parameters, written_ropes
from bifolio.model.tensor_names import HF_LLAMA

NOISE, BAND = "router_jitter_noise", 0.02  # the second is twice the first, whose value GGUF files do not store


def ropes(values: Reading) -> tuple[RopeConfig, ...]:
    """Both sets of LongRoPE have one factor of their own for cosine and sine."""
    own, (rope,) = rope_parameters(values), read_ropes(values)
    if rope.scaling != "longrope":
        return (rope,)
    short, long = own.number("short_mscale"), own.number("long_mscale")
    if short != long:
        raise UnsupportedModelError(
            f"{own.path}: short_mscale is {short} and long_mscale {long}: Phi-3.5-MoE is supported with equal ones only"
        )
    return (replace(rope, attention_factor=short),)


def write_ropes(values: Writing) -> dict[str, Any]:
    written, factor = written_ropes(values), values.config.ropes[0].attention_factor
    if written.get("rope_scaling") is not None:
        written["rope_scaling"] |= {"short_mscale": factor, "long_mscale": factor}
    return written


def check_band(values: Writing) -> dict[str, Any]:
    if abs(values["moe.band"] - BAND) > 1e-6:
        raise values.refusal(f"{NOISE} = {values['moe.band'] / 2}")
    return {}


FAMILY = Family(
    name="phimoe",
    network={"norm": "layer"},
    fields=(
        *EXPERTS,
        LOCAL_EXPERTS,
        WIDE,
        Field(
            "moe.band",
            hf=Key(NOISE, read=lambda noise: 2 * noise, write=lambda band: band / 2),
            gguf=Form(lambda v: BAND, check_band),
            default=BAND,
        ),
        Field("norm_eps", gguf="attention.layer_norm_rms_epsilon"),
        Field("head_bias", hf="lm_head_bias"),
        Field("ropes", hf=Form(ropes, write_ropes)),
    ),
    hf_types=("phimoe",),
    hf_class="PhimoeForCausalLM",
    hf_modules={"mlp.": "block_sparse_moe."},
    hf_defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_experts_per_tok": 2, "num_local_experts": 16,
                 "max_position_embeddings": 131072, "rope_theta": 1000000.0, "bos_token_id": 1, "eos_token_id": 2},
    hf_implied={"mlp_bias": False},
    hf_always=("attention_bias", "sliding_window"),
    hf_names=replace(
        HF_LLAMA,
        router="block_sparse_moe.gate",
        expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
    gguf_architectures=("phimoe",),
)  # fmt: skip
