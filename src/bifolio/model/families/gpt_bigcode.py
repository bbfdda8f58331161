"""GPT-BigCode (StarCoder, SantaCoder): GPT-2 whose query heads share one head of keys and values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.families import gpt2
from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Form
from bifolio.model.stored_form import Joined, StoredForm, joined_heads, reading, writing
from bifolio.model.tensor_names import GGUF_LLAMA

SHARED, JOINED = "multi_query", "attn.c_attn"
NAMES = ("attn.query", "attn.key", "attn.value")


def folder_form(config: ModelConfig) -> StoredForm:
    """One behind the other, or head by head where each has keys and values of its own."""
    if config.num_kv_heads == 1:
        return joined_heads(config, JOINED, NAMES)
    rows = np.arange(3 * config.query_size).reshape(config.num_heads, 3, config.head_dim)
    return StoredForm(joined=(Joined(JOINED, tuple((name, rows[:, n].reshape(-1)) for n, name in enumerate(NAMES))),))


def gguf_form(config: ModelConfig) -> StoredForm:
    return joined_heads(config, "attn_qkv", GGUF_LLAMA.qkv)


FAMILY = Family(
    name="gpt_bigcode",
    network=gpt2.NETWORK,
    fields=(
        *gpt2.FAMILY.fields,
        Field(
            "num_kv_heads",
            hf=Form(
                lambda v: 1 if v.json.flag(SHARED, True) else v["num_heads"],
                lambda v: {SHARED: v["num_kv_heads"] == 1},
            ),
        ),
    ),
    hf_types=("gpt_bigcode",),
    hf_class="GPTBigCodeForCausalLM",
    hf_defaults={"activation_function": "gelu_pytorch_tanh", "tie_word_embeddings": True, "bos_token_id": 50256,
                 "eos_token_id": 50256},
    hf_implied=gpt2.FAMILY.hf_implied,
    hf_written=gpt2.FAMILY.hf_written,
    hf_needed={"scale_attn_weights": True},
    hf_refused={"add_cross_attention": "StarCoder with cross attention is not supported"},
    hf_names=replace(gpt2.FAMILY.hf_names, qkv=NAMES, transposed=False),
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("starcoder",),
    gguf_implied={"activation": "gelu_tanh"},
    gguf_names=replace(GGUF_LLAMA, positions="position_embd", up=("ffn_up",)),
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
)  # fmt: skip
