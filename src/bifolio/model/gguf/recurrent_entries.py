"""Recurrent layers in the metadata of GGUF files: `ssm.*` ↔ `RecurrentConfig`."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from bifolio.config import ModelConfig, RecurrentConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import Value


def recurrent_from_gguf(
    metadata: Metadata, kind: Literal["delta", "mamba"], layers: list[int], attention: list[int], **overrides: Any
) -> RecurrentConfig:
    """Heads with a state of their own; `overrides` are fields that the architecture implies."""
    heads, inner = metadata.count(".ssm.time_step_rank"), metadata.count(".ssm.inner_size")
    groups, key_size = metadata.count(".ssm.group_count"), metadata.count(".ssm.state_size")
    if not heads or inner % heads:
        raise metadata.fail(f"{inner} values cannot be shared by {heads} recurrent heads")
    fields: dict[str, Any] = {
        "width": metadata.count(".ssm.conv_kernel"),
        "channels": inner + 2 * groups * key_size,
        "heads": heads,
        "groups": groups,
        "key_size": key_size,
        "value_size": inner // heads,
    }
    return RecurrentConfig(kind, tuple(layers), tuple(attention), **{**fields, **overrides})


def recurrent_entries(config: ModelConfig) -> dict[str, Value]:
    """The reverse of `recurrent_from_gguf`."""
    own = config.recurrent
    if own is None:
        raise UnsupportedModelError("GGUF files of this architecture describe recurrent layers, which the model lacks")
    if own.projection_bias:
        raise UnsupportedModelError("GGUF cannot describe biases in the projections of recurrent layers")
    if own.dt_limits != (0.0, float("inf")):
        raise UnsupportedModelError(f"GGUF cannot describe time steps of recurrent layers limited to {own.dt_limits}")
    return {
        "ssm.conv_kernel": own.width,
        "ssm.inner_size": own.inner_size,
        "ssm.state_size": own.key_size,
        "ssm.time_step_rank": own.heads,
        "ssm.group_count": own.groups,
    }


def attention_entries(config: ModelConfig) -> dict[str, Value]:
    """The key/value heads of each layer; 0: the layer has no attention."""
    heads = [config.num_kv_heads * (layer in config.attention_layers) for layer in range(config.num_layers)]
    return {"attention.head_count_kv": np.array(heads, np.int32)}


def attention_layers(metadata: Metadata, num_layers: int) -> list[int]:
    """The layers with key/value heads."""
    heads = metadata.by_layer(".attention.head_count_kv", num_layers)
    return [layer for layer in range(num_layers) if heads[layer]]
