"""Names of the tensors of heads for multi-token prediction, in the layouts that families use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NextTokenNames:
    """Names without `.weight`; {} stands for the number of layers of the model."""

    layer: str  # prefix of the names of the head's layer, which are those of other layers
    token_norm: str
    hidden_norm: str
    joint: str  # [d, 2 d]  of the normed embedding and the normed hidden state
    final_norm: str
    embedding: str = ""  # the target's where the files have none
    head: str = ""  # as `embedding`


HF_NEXT_TOKEN = NextTokenNames(
    layer="model.layers.{}.",
    token_norm="model.layers.{}.enorm",
    hidden_norm="model.layers.{}.hnorm",
    joint="model.layers.{}.eh_proj",
    final_norm="model.layers.{}.shared_head.norm",
    embedding="model.layers.{}.embed_tokens",
    head="model.layers.{}.shared_head.head",
)
GGUF_NEXT_TOKEN = NextTokenNames(
    layer="blk.{}.",
    token_norm="blk.{}.nextn.enorm",
    hidden_norm="blk.{}.nextn.hnorm",
    joint="blk.{}.nextn.eh_proj",
    final_norm="blk.{}.nextn.shared_head_norm",
    embedding="blk.{}.nextn.embed_tokens",
    head="blk.{}.nextn.shared_head_head",
)
