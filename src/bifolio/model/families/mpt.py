"""MPT: layer norms without biases, queries, keys and values in one matrix, scores that fall with distance (ALiBi)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Writing
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form, Key
from bifolio.model.tensor_names import GGUF_LLAMA, TensorNames

ATTENTION = "attn_config"
NEEDED = {"alibi": True, "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None}


def largest_bias(values: Reading) -> float:
    own = values.json.object(ATTENTION)
    for key, needed in NEEDED.items():
        if own.get(key) not in (None, needed):
            raise UnsupportedModelError(
                f"{own.path}: {ATTENTION}.{key} is {own.get(key)}: MPT is supported with {needed} only"
            )
    return own.number("alibi_bias_max", 8.0)


def write_attention(values: Writing) -> dict[str, Any]:
    return {ATTENTION: {"alibi": True, "alibi_bias_max": int(values["alibi"])}}


FAMILY = Family(
    name="mpt",
    network={"norm": "layer", "norm_bias": False, "gated_mlp": False, "ropes": (), "activation": "gelu"},
    fields=(
        Field("hidden_size", hf="d_model"),
        Field("num_layers", hf="n_layers"),
        Field("num_heads", hf="n_heads"),
        Field("num_kv_heads", hf=None),
        Field("head_dim", hf=None),
        Field(
            "intermediate_size",
            hf=Form(
                lambda v: v.json.count("expansion_ratio", 4, most=64) * v["hidden_size"],
                lambda v: {"expansion_ratio": v["intermediate_size"] // v["hidden_size"]},
            ),
        ),
        Field("max_position", hf=Key("max_seq_len", default=2048)),
        Field("norm_eps", hf=Key("layer_norm_epsilon", default=1e-5)),
        Field("alibi", hf=Form(largest_bias, write_attention), gguf=Key("attention.max_alibi_bias", default=8.0)),
    ),
    hf_types=("mpt",),
    hf_class="MptForCausalLM",
    hf_defaults={"tie_word_embeddings": True},
    hf_implied={"qkv_bias": False, "mlp_bias": False, "layers.window": ()},
    hf_needed={"no_bias": True},
    hf_refused={"logit_scale": "MPT with scaled logits is not supported"},
    hf_names=TensorNames(
        embedding="transformer.wte",
        layer="transformer.blocks.{}.",
        attention_norm="norm_1",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        mlp_norm="norm_2",
        up=("ffn.up_proj",),
        down="ffn.down_proj",
        final_norm="transformer.norm_f",
        head="lm_head",
    ),
    gguf_architectures=("mpt",),
    gguf_refused={".attention.clamp_kqv": "MPT with clipped queries, keys and values is not supported",
                  "position_embd.weight": "MPT with learned positions is not supported"},
    gguf_names=replace(GGUF_LLAMA, qkv=("attn_qkv",), up=("ffn_up",)),
)  # fmt: skip
