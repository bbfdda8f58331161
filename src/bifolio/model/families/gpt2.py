"""GPT-2: layer norms with biases, learned positions, an ungated MLP. Folders store layer matrices transposed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.model.decoder_fields import activation
from bifolio.model.families.family import Family, fresh_decoder
from bifolio.model.fields import Field, Key
from bifolio.model.tensor_names import GGUF_LLAMA, TensorNames

NETWORK: dict[str, Any] = {"norm": "layer", "gated_mlp": False, "learned_positions": True, "ropes": ()}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
BY_LAYER = "GPT-2 with attention scaled by layer index is not supported"


def fresh_config(*, num_heads: int, num_kv_heads: int, **sizes: Any) -> ModelConfig:
    """Configuration for training; every head has its own keys and values, so `num_kv_heads` is ignored."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_heads}
    return fresh_decoder("gpt2", activation="gelu_tanh", **heads, **sizes, **NETWORK, **BIASES)


FAMILY = Family(
    name="gpt2",
    network=NETWORK,
    fields=(
        Field("hidden_size", hf="n_embd"),
        Field("num_layers", hf="n_layer"),
        Field("num_heads", hf="n_head"),
        Field("num_kv_heads", hf=None),
        Field("head_dim", hf=None),
        Field("intermediate_size", hf=Key("n_inner", default=lambda v: 4 * v["hidden_size"])),
        Field(
            "max_position",
            hf="n_positions",
            gguf=Key("context_length", reader=lambda v: v.header.shape("position_embd.weight")[0]),
        ),
        Field("norm_eps", hf=Key("layer_norm_epsilon", default=1e-5)),
        Field("activation", hf=activation("activation_function")),
    ),
    hf_types=("gpt2",),
    hf_class="GPT2LMHeadModel",
    hf_defaults={"activation_function": "gelu_new", "tie_word_embeddings": True},
    hf_implied={**BIASES, "layers.window": ()},
    hf_written={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    hf_refused={"scale_attn_by_inverse_layer_idx": BY_LAYER, "reorder_and_upcast_attn": BY_LAYER},
    hf_names=TensorNames(
        embedding="transformer.wte",
        positions="transformer.wpe",
        layer="transformer.h.{}.",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        output="attn.c_proj",
        mlp_norm="ln_2",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        final_norm="transformer.ln_f",
        head="lm_head",
        transposed=True,
    ),
    gguf_architectures=("gpt2",),
    gguf_implied={"activation": "gelu_tanh"},
    gguf_names=replace(GGUF_LLAMA, positions="position_embd", qkv=("attn_qkv",), up=("ffn_up",)),
    fresh_config=fresh_config,
)
