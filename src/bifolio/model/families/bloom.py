"""BLOOM: layer norms with biases, a norm of the embeddings, and scores that fall with the distance (ALiBi).

Folders store queries, keys and values head by head in one matrix, GGUF files one behind the other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key
from bifolio.model.stored_form import Joined, StoredForm, joined_heads, reading, writing
from bifolio.model.tensor_names import GGUF_LLAMA, TensorNames

NAMES = ("self_attention.query", "self_attention.key", "self_attention.value")
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}


def folder_form(config: ModelConfig) -> StoredForm:
    rows = np.arange(3 * config.query_size).reshape(config.num_heads, 3, config.head_dim)
    parts = tuple((name, rows[:, n].reshape(-1)) for n, name in enumerate(NAMES))
    return StoredForm(joined=(Joined("self_attention.query_key_value", parts),))


def gguf_form(config: ModelConfig) -> StoredForm:
    return joined_heads(config, "attn_qkv", GGUF_LLAMA.qkv)


FAMILY = Family(
    name="bloom",
    network={"norm": "layer", "gated_mlp": False, "embedding_norm": True, "ropes": (), "activation": "gelu_tanh",
             "alibi": 8.0},
    fields=(
        Field("hidden_size", hf=("hidden_size", "n_embed")),
        Field("num_layers", hf=("n_layer", "num_hidden_layers")),
        Field("num_heads", hf=("n_head", "num_attention_heads")),
        Field("num_kv_heads", hf=None),
        Field("head_dim", hf=None),
        Field("intermediate_size", hf=None, default=lambda v: 4 * v["hidden_size"]),
        Field("max_position", hf=Key(("seq_length", "max_position_embeddings"), default=2048)),
        Field("norm_eps", hf=Key("layer_norm_epsilon", default=1e-5)),
    ),
    hf_types=("bloom",),
    hf_class="BloomForCausalLM",
    hf_defaults={"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2},
    hf_implied={**BIASES, "layers.window": ()},
    hf_refused={"apply_residual_connection_post_layernorm": "BLOOM with residuals of normed inputs is not supported"},
    hf_names=TensorNames(
        embedding="transformer.word_embeddings",
        embedding_norm="transformer.word_embeddings_layernorm",
        layer="transformer.h.{}.",
        attention_norm="input_layernorm",
        qkv=NAMES,
        output="self_attention.dense",
        mlp_norm="post_attention_layernorm",
        up=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
        final_norm="transformer.ln_f",
        head="lm_head",
    ),
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("bloom",),
    gguf_names=replace(GGUF_LLAMA, embedding_norm="token_embd_norm", up=("ffn_up",)),
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
)  # fmt: skip
