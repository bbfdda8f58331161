"""Jais 2: layer norms with biases, an ungated MLP of squared ReLU, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from bifolio.model.families.family import Family
from bifolio.model.fields import Field, Key
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

FAMILY = Family(
    name="jais2",
    network={"norm": "layer", "gated_mlp": False},
    fields=(Field("norm_eps", hf=Key("layer_norm_eps", default=1e-5)),),
    hf_types=("jais2",),
    hf_class="Jais2ForCausalLM",
    hf_defaults={"hidden_act": "relu2", "max_position_embeddings": 8192, "attention_bias": True, "mlp_bias": True,
                 "bos_token_id": 0, "eos_token_id": 150024},
    hf_implied={"layers.window": ()},
    hf_always=("attention_bias", "mlp_bias"),
    hf_names=replace(HF_LLAMA, up=("mlp.up_proj",)),
    gguf_architectures=("jais2",),
    gguf_implied={"activation": "relu2"},
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
)  # fmt: skip
