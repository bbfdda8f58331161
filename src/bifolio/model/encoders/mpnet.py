"""MPNet (all-mpnet-base-v2): BERT with a learned bias of attention by distance, which all layers share."""

from __future__ import annotations

from bifolio.model.encoders.shared import BERT, SIZES, padded_positions
from bifolio.model.families.family import Family, HeadLayer
from bifolio.model.fields import Field
from bifolio.model.tensor_names import TensorNames

FAMILY = Family(
    name="mpnet",
    network={**BERT, "distance_bias": "buckets"},
    fields=(
        *SIZES,
        *padded_positions(1),
        Field("position_offset", hf=None, default=2),
        Field("distance_buckets", hf="relative_attention_num_buckets", default=32),
    ),
    hf_types=("mpnet",),
    hf_class="MPNetModel",
    hf_defaults={"hidden_act": "gelu"},
    hf_names=TensorNames(
        embedding="mpnet.embeddings.word_embeddings",
        positions="mpnet.embeddings.position_embeddings",
        embedding_norm="mpnet.embeddings.LayerNorm",
        distance_bias="mpnet.encoder.relative_attention_bias",
        layer="mpnet.encoder.layer.{}.",
        attention_norm="attention.LayerNorm",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        output="attention.attn.o",
        mlp_norm="output.LayerNorm",
        up=("intermediate.dense",),
        down="output.dense",
        final_norm="",
        head="",
    ),
    hf_head=(HeadLayer("classifier.dense", "tanh"), HeadLayer("classifier.out_proj")),
)
