"""nanochat: norms without weights, also behind the embeddings and the rope, squared ReLU, rope in the other direction.

GGUF files are those of bifolio alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.families.family import Family
from bifolio.model.stored_form import Joined, StoredForm, reading, writing
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA


def folder_form(config: ModelConfig) -> StoredForm:
    """The halves of each head change places, which turns the direction of the rope."""

    def swapped(name: str, heads: int) -> Joined:
        rows = np.arange(heads * config.head_dim).reshape(heads, 2, -1)
        return Joined(name, ((name, rows[:, ::-1].reshape(-1)),))

    query, key = HF_LLAMA.qkv[:2]
    return StoredForm(joined=(swapped(query, config.num_heads), swapped(key, config.num_kv_heads)))


FAMILY = Family(
    name="nanochat",
    network={"norm_weight": False, "embedding_norm": True, "qk_norm": True, "qk_norm_rotated": True,
             "qk_norm_after_rope": True, "gated_mlp": False},
    hf_types=("nanochat",),
    hf_class="NanoChatForCausalLM",
    hf_defaults={"hidden_act": "relu2", "final_logit_softcapping": 15.0, "bos_token_id": 0, "eos_token_id": 1},
    hf_implied={"mlp_bias": False, "layers.window": ()},
    hf_always=("attention_bias", "final_logit_softcapping"),
    hf_names=replace(HF_LLAMA, up=("mlp.fc1",), down="mlp.fc2", embedding_norm="model.norm"),
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("nanochat",),
    gguf_implied={"activation": "relu2"},
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",), embedding_norm="token_embd_norm"),
)  # fmt: skip
