"""GPT-J: attention and MLP side by side on one layer norm, rope on neighbouring pairs of a part of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import RopeConfig
from bifolio.model.decoder_fields import activation
from bifolio.model.description import Reading, Writing
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form, Key
from bifolio.model.tensor_names import GGUF_LLAMA, TensorNames

ROTATED, THETA = "rotary_dim", 10000.0


def write_rope(values: Writing) -> dict[str, Any]:
    rope = values.config.ropes[0]
    if rope != RopeConfig(THETA, rope.rotary_dim):
        raise values.refusal("another rope than the plain one")
    return {ROTATED: rope.rotary_dim}


def rope(values: Reading) -> tuple[RopeConfig, ...]:
    return (RopeConfig(THETA, values.json.count(ROTATED, least=2, most=values["head_dim"])),)


FAMILY = Family(
    name="gptj",
    network={"norm": "layer", "gated_mlp": False, "parallel_block": True},
    fields=(
        Field("hidden_size", hf="n_embd"),
        Field("num_layers", hf="n_layer"),
        Field("num_heads", hf="n_head"),
        Field("num_kv_heads", hf=None),
        Field("head_dim", hf=None),
        Field("intermediate_size", hf=Key("n_inner", default=lambda v: 4 * v["hidden_size"])),
        Field("max_position", hf="n_positions"),
        Field("norm_eps", hf=Key("layer_norm_epsilon", default=1e-5)),
        Field("activation", hf=activation("activation_function")),
        Field("ropes", hf=Form(rope, write_rope)),
    ),
    hf_types=("gptj",),
    hf_class="GPTJForCausalLM",
    hf_defaults={"activation_function": "gelu_new", "rotary_dim": 64, "bos_token_id": 50256, "eos_token_id": 50256},
    hf_implied={"qkv_bias": False, "mlp_bias": True, "head_bias": True, "layers.window": ()},
    hf_names=TensorNames(
        embedding="transformer.wte",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        output="attn.out_proj",
        mlp_norm="",
        up=("mlp.fc_in",),
        down="mlp.fc_out",
        final_norm="transformer.ln_f",
        head="lm_head",
    ),
    hf_interleaved=True,
    gguf_architectures=("gptj",),
    gguf_implied={"activation": "gelu_tanh"},
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
    gguf_interleaved=True,
)
