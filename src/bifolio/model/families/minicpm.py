"""MiniCPM 1 to 4: Llama with factors of embeddings, residual additions and logits. Folders bring code of their own."""

from __future__ import annotations

import math

from bifolio.model.description import Reading, Writing
from bifolio.model.families.family import Family
from bifolio.model.families.granite import LOGIT_SCALE
from bifolio.model.fields import REQUIRED, Field, Form, Key

EMBEDDING, DEPTH, WIDTH = "scale_emb", "scale_depth", "dim_model_base"


def residual_scale(values: Reading) -> float:
    return values.json.number(DEPTH) / math.sqrt(values["num_layers"])


def write_depth(values: Writing) -> dict[str, float]:
    return {DEPTH: values["residual_scale"] * math.sqrt(values["num_layers"])}


FAMILY = Family(
    name="minicpm",
    fields=(
        Field("embedding_scale", hf=Key(EMBEDDING, optional=False), gguf="embedding_scale", default=REQUIRED),
        Field("residual_scale", hf=Form(residual_scale, write_depth), gguf="residual_scale", default=REQUIRED),
        Field(
            "logit_scale",
            hf=Form(
                lambda v: v.json.number(WIDTH) / v["hidden_size"],
                lambda v: {WIDTH: v["logit_scale"] * v["hidden_size"]},
            ),
            gguf=LOGIT_SCALE,
            write=lambda scale: 1 / scale,
            default=REQUIRED,
        ),
    ),
    hf_types=("minicpm",),
    hf_class="MiniCPMForCausalLM",
    hf_defaults={"tie_word_embeddings": True},
    hf_implied={"mlp_bias": False, "layers.window": ()},
    hf_always=("attention_bias", "tie_word_embeddings"),
    hf_refused={
        "num_experts": "MiniCPM with experts is not supported",
        "sparse_config": "MiniCPM with sparse attention (InfLLM) is not supported: without sparse_config it is dense",
    },
    gguf_architectures=("minicpm",),
    gguf_interleaved=True,
)
