"""Names of the tensors of heads for multi-token prediction, in the layouts that families use."""

from __future__ import annotations

from dataclasses import dataclass, replace


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
    chains_normed: bool = False  # a head continues its draft with its normed hidden state


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
QWEN_NEXT_TOKEN = NextTokenNames(  # folders store these with or without `model.`
    layer="model.mtp.layers.0.",
    token_norm="model.mtp.pre_fc_norm_embedding",
    hidden_norm="model.mtp.pre_fc_norm_hidden",
    joint="model.mtp.fc",
    final_norm="model.mtp.norm",
    chains_normed=True,
)
GGUF_QWEN_NEXT_TOKEN = replace(GGUF_NEXT_TOKEN, chains_normed=True)
