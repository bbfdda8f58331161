"""jina-bert-v2 (jina-embeddings-v2, jina-reranker-v1): BERT with ALiBi in both directions, and a gated MLP.

Folders have the `model_type` of BERT; `position_embedding_type` tells them apart. Only the second matrix of the MLP has
a bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.model.encoders import bert
from bifolio.model.encoders.joined_rows import JoinedRows
from bifolio.model.encoders.shared import BIASES, ENCODER, POST_NORMS, SIZES, TOKEN_TYPES
from bifolio.model.families.family import Family
from bifolio.model.model_file import TensorSource
from bifolio.quant.tensor import QuantizedTensor

NETWORK: dict[str, Any] = {
    **ENCODER, **BIASES, **POST_NORMS, "gated_mlp": True, "ropes": (), "distance_bias": "alibi", "activation": "gelu",
}  # fmt: skip
UNBIASED = (".mlp.gated_layers.bias", ".ffn_gate.bias", ".ffn_up.bias")


@dataclass(frozen=True, slots=True)
class ZeroBiases:
    """The tensors of a file, with zeros for the biases that it leaves out."""

    source: TensorSource
    config: ModelConfig

    def has(self, name: str) -> bool:
        return name.endswith(UNBIASED) or self.source.has(name)

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        if name.endswith(UNBIASED) and not self.source.has(name):
            return QuantizedTensor.from_array(np.zeros(shape, np.float32))
        return self.source.view(name, shape)


def _gguf_source(source: TensorSource, config: ModelConfig) -> TensorSource:
    return ZeroBiases(JoinedRows(source, config), config)


FAMILY = Family(
    name="jinabert",
    network=NETWORK,
    fields=(*SIZES, TOKEN_TYPES),
    hf_types=(bert.JINA,),
    hf_class="JinaBertModel",
    hf_defaults={"type_vocab_size": 2, "feed_forward_type": "original"},
    hf_needed={"feed_forward_type": "geglu"},
    hf_refused=bert.FAMILY.hf_refused,
    hf_names=replace(bert.NAMES, positions="", mlp_norm="mlp.layernorm", up=("mlp.gated_layers",), down="mlp.wo"),
    hf_head=bert.FAMILY.hf_head,
    folder_source=ZeroBiases,
    gguf_architectures=("jina-bert-v2",),
    gguf_refused={
        "blk.0.attn_q_norm.weight": "norms of queries and keys are not supported in this family",
        "blk.0.attn_norm_2.weight": "a second norm after attention is not supported in this family",
    },
    gguf_names=replace(bert.GGUF_NAMES, positions="", up=("ffn_gate", "ffn_up")),
    gguf_source=_gguf_source,
)
