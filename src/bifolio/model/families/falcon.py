"""Falcon 7B and 40B: attention and MLP side by side on one layer norm or on one each, few key/value heads.

Folders store the queries of each key/value head, its key and its value in one matrix, head by head; GGUF files store
all queries, all keys and all values one behind the other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.decoder_fields import activation, in_tensors, one_bias
from bifolio.model.description import Reading
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key
from bifolio.model.stored_form import Joined, StoredForm, joined_heads, reading, writing
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

HF_NAMES = replace(
    HF_LLAMA,
    embedding="transformer.word_embeddings",
    layer="transformer.h.{}.",
    qkv=("self_attention.query", "self_attention.key", "self_attention.value"),
    output="self_attention.dense",
    mlp_norm="ln_mlp",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="transformer.ln_f",
)
SECOND_NORM = "attn_norm_2"


def num_kv_heads(values: Reading) -> int:
    """Those of Falcon-40B are stored; the older form has one, or one for each query head."""
    if values.json.flag("new_decoder_architecture", False):
        return values.json.count("num_kv_heads", values["num_heads"])
    return 1 if values.json.flag("multi_query", True) else int(values["num_heads"])


def has_two_norms(values: Reading) -> bool:
    is_new = values.json.flag("new_decoder_architecture", False)
    return is_new and values.json.count("num_ln_in_parallel_attn", 2) == 2


def folder_form(config: ModelConfig) -> StoredForm:
    groups, queries = config.num_kv_heads, config.num_heads // config.num_kv_heads
    rows = np.arange(config.query_size + 2 * config.kv_size).reshape(groups, queries + 2, config.head_dim)
    spans = rows[:, :-2], rows[:, -2], rows[:, -1]
    parts = tuple((name, span.reshape(-1)) for name, span in zip(HF_NAMES.qkv, spans, strict=True))
    joined = Joined("self_attention.query_key_value", parts)
    return StoredForm((joined,), renamed(("input_layernorm", "ln_attn")) if config.parallel_norms else ())


def gguf_form(config: ModelConfig) -> StoredForm:
    """The first norm of a file is that of the MLP, where attention has a second one."""
    two = renamed(("attn_norm", SECOND_NORM), ("ffn_norm", "attn_norm")) if config.parallel_norms else ()
    return replace(joined_heads(config, "attn_qkv", GGUF_LLAMA.qkv), renamed=two)


def renamed(*names: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """The weights and the biases of norms under other names."""
    return tuple((f"{ours}.{end}", f"{theirs}.{end}") for ours, theirs in names for end in ("weight", "bias"))


FAMILY = Family(
    name="falcon",
    network={"norm": "layer", "gated_mlp": False, "parallel_block": True},
    fields=(
        *one_bias("bias"),
        Field("num_kv_heads", hf=Key("num_kv_heads", reader=num_kv_heads)),
        Field("head_dim", hf=None),
        Field("intermediate_size", hf=Key("ffn_hidden_size", default=lambda v: 4 * v["hidden_size"])),
        Field("norm_eps", hf=Key("layer_norm_epsilon", default=1e-5)),
        Field("activation", hf=activation("activation")),
        Field(
            "parallel_norms",
            hf=Key("num_ln_in_parallel_attn", reader=has_two_norms, write=lambda two: 2 if two else 1),
            gguf=in_tensors(f"{SECOND_NORM}.weight"),
        ),
    ),
    hf_types=("falcon",),
    hf_class="FalconForCausalLM",
    hf_defaults={"activation": "gelu", "tie_word_embeddings": True, "bos_token_id": 11, "eos_token_id": 11},
    hf_written={"new_decoder_architecture": True, "alibi": False},
    hf_needed={"alibi": False, "parallel_attn": True},
    hf_names=HF_NAMES,
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("falcon",),
    gguf_implied={"activation": "gelu"},
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
)
