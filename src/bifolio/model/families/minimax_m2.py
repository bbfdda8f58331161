"""MiniMax-M2: sigmoid routing with a bias, norms on all heads of a token together, rope on half of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import RopeConfig
from bifolio.model.description import Reading, Writing
from bifolio.model.expert_fields import ADD_UP, LOCAL_EXPERTS, SIGMOID_EXPERTS, WIDE
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.huggingface.rope_fields import read_rope, rope_parameters, written_ropes
from bifolio.model.tensor_names import HF_LLAMA

ROTATED = "rotary_dim"
NEEDED = {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True,
          "attn_type_list": 1}  # fmt: skip


def ropes(values: Reading) -> tuple[RopeConfig, ...]:
    """The first folders name the number of rotated dimensions."""
    own, dim = rope_parameters(values), values["head_dim"]
    share = values.json.count(ROTATED, dim, least=2, most=dim) / dim
    return (read_rope(values, own.with_defaults({"partial_rotary_factor": share}), dim),)


def write_ropes(values: Writing) -> dict[str, Any]:
    return {**written_ropes(values), ROTATED: values.config.ropes[0].rotary_dim}


FAMILY = Family(
    name="minimax_m2",
    network={"qk_norm": True, "qk_norm_all_heads": True},
    fields=(
        *SIGMOID_EXPERTS,
        LOCAL_EXPERTS,
        WIDE,
        ADD_UP,
        Field("moe.scale", hf=None),
        Field("moe.num_groups", hf=None),
        Field("moe.top_groups", hf=None),
        Field("moe.shared_size", hf=None),
        Field("layers.dense", hf=None),
        Field("ropes", hf=Form(ropes, write_ropes)),
    ),
    hf_types=("minimax_m2",),
    hf_class="MiniMaxM2ForCausalLM",
    hf_modules={"mlp.": "block_sparse_moe."},
    hf_defaults={"num_key_value_heads": 8, "head_dim": 128, "num_experts_per_tok": 8, "num_local_experts": 256,
                 "rope_theta": 5000000.0, "bos_token_id": 200034, "eos_token_id": 200020},
    hf_implied={"qkv_bias": False, "output_bias": False, "mlp_bias": False, "layers.window": ()},
    hf_needed=NEEDED,
    hf_refused={"shared_intermediate_size": "MiniMax-M2 with shared experts is not supported"},
    hf_names=replace(
        HF_LLAMA,
        router="block_sparse_moe.gate",
        selection_bias="block_sparse_moe.e_score_correction_bias",
        expert_up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
        expert_down="block_sparse_moe.experts.{}.w2",
    ),
    gguf_architectures=("minimax-m2",),
)  # fmt: skip
