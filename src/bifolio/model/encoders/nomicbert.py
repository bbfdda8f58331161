"""NomicBERT (nomic-embed-text): BERT with rope instead of positions, a gated MLP, and no biases of products.

Folders of the class of transformers and those of the class in the models' own repositories differ in their names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.model.decoder_fields import activation
from bifolio.model.description import Reading
from bifolio.model.encoders.bert import GGUF_NAMES
from bifolio.model.encoders.joined_rows import JoinedRows
from bifolio.model.encoders.shared import ENCODER, POST_NORMS, SIZES, TOKEN_TYPES
from bifolio.model.families.family import Family, HeadLayer
from bifolio.model.fields import Field, Form, Key
from bifolio.model.gguf.rope_fields import read_rope, rope_entries
from bifolio.model.huggingface.rope_fields import written_ropes
from bifolio.model.model_file import TensorSource
from bifolio.model.tensor_names import TensorNames
from bifolio.quant.tensor import QuantizedTensor

THETA = 1000.0
NETWORK: dict[str, Any] = {
    **ENCODER, **POST_NORMS, "gated_mlp": True, "qkv_bias": False, "output_bias": False, "mlp_bias": False,
}  # fmt: skip
NAMES = TensorNames(
    embedding="nomic_bert.embeddings.word_embeddings",
    types="nomic_bert.embeddings.token_type_embeddings",
    embedding_norm="nomic_bert.embeddings.LayerNorm",
    layer="nomic_bert.layers.{}.",
    attention_norm="post_attention_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    mlp_norm="post_mlp_layernorm",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    final_norm="",
    head="",
)
OTHER_NAMES = {
    "nomic_bert.layers.": "nomic_bert.encoder.layers.",
    "nomic_bert.embeddings.LayerNorm": "nomic_bert.emb_ln",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.up_proj": "mlp.fc11",
    "mlp.down_proj": "mlp.fc2",
}
ACTIVATION = Form(
    activation("activation_function", "hidden_act", swiglu="silu", geglu="gelu").read, activation("hidden_act").write
)
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


@dataclass(frozen=True, slots=True)
class EitherNames:
    """The tensors of a folder under either set of names; one of them joins query, key and value in a matrix."""

    source: TensorSource
    config: ModelConfig

    def _other(self, name: str) -> str:
        for ours, other in OTHER_NAMES.items():
            name = name.replace(ours, other)
        return name

    def has(self, name: str) -> bool:
        return self.source.has(name) or self.source.has(self._other(name)) or self._part(name) is not None

    def _part(self, name: str) -> int | None:
        found = [place for place, part in enumerate(PARTS) if part in name]
        return found[0] if found and self.source.has(self._joined(name, found[0])) else None

    def _joined(self, name: str, place: int) -> str:
        return self._other(name.replace(PARTS[place], "attn.Wqkv"))

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        if self.source.has(name):
            return self.source.view(name, shape)
        place = self._part(name)
        if place is None:
            other = self._other(name)
            return self.source.view(other if self.source.has(other) else name, shape)
        rows = shape[0]
        joined = self.source.view(self._joined(name, place), (3 * rows, shape[1]))
        return joined.select_rows(np.arange(place * rows, (place + 1) * rows))


def _ropes(values: Reading) -> tuple[RopeConfig, ...]:
    own = values.json.object("rope_parameters")
    theta = own.number("rope_theta", 0.0) or values.json.number("rotary_emb_base", 0.0) or THETA
    return (RopeConfig(theta, values["head_dim"]),)


FAMILY = Family(
    name="nomicbert",
    network=NETWORK,
    fields=(
        *SIZES,
        TOKEN_TYPES,
        Field("hidden_size", hf=("hidden_size", "n_embd")),
        Field("num_layers", hf=("num_hidden_layers", "n_layer")),
        Field("num_heads", hf=("num_attention_heads", "n_head")),
        Field("intermediate_size", hf=("intermediate_size", "n_inner")),
        Field("max_position", hf=Key(("max_position_embeddings", "n_positions"), default=2048)),
        Field("norm_eps", hf=Key(("layer_norm_eps", "layer_norm_epsilon"), default=1e-12)),
        Field("activation", hf=ACTIVATION),
        Field("ropes", hf=Form(_ropes, written_ropes), gguf=Form(lambda v: (read_rope(v),), rope_entries)),
    ),
    hf_types=("nomic_bert",),
    hf_class="NomicBertModel",
    hf_defaults={"hidden_act": "silu", "type_vocab_size": 2},
    hf_needed={
        "prenorm": False, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "qkv_proj_bias": False,
        "mlp_fc1_bias": False, "mlp_fc2_bias": False, "rotary_emb_scale_base": None, "num_experts": 0,
    },
    hf_refused={"moe_every_n_layers": "experts are not supported"},
    hf_names=NAMES,
    hf_head=(HeadLayer("nomic_bert.pooler.dense", "tanh"), HeadLayer("classifier")),
    folder_source=EitherNames,
    gguf_architectures=("nomic-bert",),
    gguf_implied={"activation": "silu"},
    gguf_names=replace(GGUF_NAMES, positions="", up=("ffn_gate", "ffn_up")),
    gguf_source=JoinedRows,
)  # fmt: skip
