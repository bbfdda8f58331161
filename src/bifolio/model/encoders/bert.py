"""BERT (MiniLM, bge, gte, e5): layer norms behind attention and MLP, learned positions, types of tokens."""

from __future__ import annotations

from dataclasses import replace

from bifolio.model.encoders.joined_rows import JoinedRows
from bifolio.model.encoders.shared import BERT, SIZES, TOKEN_TYPES
from bifolio.model.families.family import Family, HeadLayer
from bifolio.model.tensor_names import GGUF_LLAMA, TensorNames

NAMES = TensorNames(
    embedding="bert.embeddings.word_embeddings",
    positions="bert.embeddings.position_embeddings",
    types="bert.embeddings.token_type_embeddings",
    embedding_norm="bert.embeddings.LayerNorm",
    layer="bert.encoder.layer.{}.",
    attention_norm="attention.output.LayerNorm",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    output="attention.output.dense",
    mlp_norm="output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    final_norm="",
    head="",
)
GGUF_NAMES = replace(
    GGUF_LLAMA,
    positions="position_embd",
    types="token_types",
    embedding_norm="token_embd_norm",
    attention_norm="attn_output_norm",
    mlp_norm="layer_output_norm",
    up=("ffn_up",),
)

JINA = "jina-bert-v2"  # whose folders have the same `model_type`

FAMILY = Family(
    name="bert",
    network=BERT,
    fields=(*SIZES, TOKEN_TYPES),
    hf_types=("bert",),
    hf_variant=lambda raw: JINA if raw.get("position_embedding_type") == "alibi" else "bert",
    hf_class="BertModel",
    hf_defaults={"hidden_act": "gelu", "type_vocab_size": 2},
    hf_needed={"position_embedding_type": "absolute"},
    hf_refused={
        "is_decoder": "a BERT that generates text is not supported",
        "add_cross_attention": "it has two inputs",
    },
    hf_names=NAMES,
    hf_head=(HeadLayer("bert.pooler.dense", "tanh"), HeadLayer("classifier")),
    gguf_architectures=("bert",),
    gguf_implied={"activation": "gelu"},
    gguf_names=GGUF_NAMES,
    gguf_source=JoinedRows,
)
