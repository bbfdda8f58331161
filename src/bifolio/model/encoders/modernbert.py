"""ModernBERT: norms before attention and MLP, rope, a gated MLP, and most layers with a window in both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.config import RopeConfig
from bifolio.model.decoder_fields import activation
from bifolio.model.description import Reading, Writing
from bifolio.model.encoders.shared import ENCODER, SIZES
from bifolio.model.families.family import Family, HeadLayer
from bifolio.model.fields import Field, Form, Key
from bifolio.model.gguf.rope_fields import local_rope, read_rope, rope_entries
from bifolio.model.tensor_names import GGUF_LLAMA, TensorNames

PERIOD = 3  # in each run of this many layers one has no window
FULL, LOCAL = "full_attention", "sliding_attention"
NETWORK: dict[str, Any] = {
    **ENCODER, "embedding_norm": True, "norm_bias": False, "gated_mlp": True, "qkv_bias": False, "output_bias": False,
    "mlp_bias": False,
}  # fmt: skip


def _kinds(values: Reading) -> list[str]:
    """The kind of each layer."""
    stored = values.json.texts("layer_types")
    period = values.json.count("global_attn_every_n_layers", PERIOD)
    kinds = list(stored) or [FULL if layer % period == 0 else LOCAL for layer in values.layers]
    if len(kinds) != len(values.layers) or not set(kinds) <= {FULL, LOCAL}:
        raise values.json.wrong("layer_types", f"{FULL} or {LOCAL} of each layer")
    return kinds


def _ropes(values: Reading) -> tuple[RopeConfig, ...]:
    stored, found = values.json.object("rope_parameters"), []
    for kind, key, usual in ((FULL, "global_rope_theta", 160000.0), (LOCAL, "local_rope_theta", 10000.0)):
        theta = stored.object(kind).number("rope_theta", values.json.number(key, usual))
        found.append(RopeConfig(theta, values["head_dim"]))
    return tuple(found)


def _windows(values: Reading) -> tuple[int | None, ...]:
    """A token sees half of the window in each direction, and itself."""
    reach = values.json.count("local_attention", 128) // 2 + 1
    return tuple(None if kind == FULL else reach for kind in _kinds(values))


def _rope_of_layers(values: Reading) -> tuple[int, ...]:
    return tuple(int(window is not None) for window in values["layers.window"])


def _gguf_windows(values: Reading) -> tuple[int | None, ...]:
    """The first layer of each period has no window, unless the file lists the layers that have one."""
    header, key = values.header, ".attention.sliding_window_pattern"
    reach, pattern = header.count(".attention.sliding_window", 128) // 2 + 1, header.array(key)
    if pattern is None:
        period = header.count(key, PERIOD, least=1)
        return tuple(None if layer % period == 0 else reach for layer in values.layers)
    if len(pattern) != len(values.layers):
        raise header.wrong(key, f"a list for {len(values.layers)} layers, not for {len(pattern)},")
    return tuple(reach if is_local else None for is_local in pattern.tolist())


def _gguf_window_entries(values: Writing) -> dict[str, Any]:
    windows = values["layers.window"]
    reach = max((window for window in windows if window is not None), default=1)
    pattern = np.array([window is not None for window in windows])
    return {"attention.sliding_window": 2 * (reach - 1), "attention.sliding_window_pattern": pattern}


def _gguf_ropes(values: Reading) -> tuple[RopeConfig, ...]:
    rope = read_rope(values)
    return rope, local_rope(values, rope.rotary_dim)


FAMILY = Family(
    name="modernbert",
    network=NETWORK,
    fields=(
        *SIZES,
        Field("norm_eps", hf=Key("norm_eps", default=1e-5)),
        Field("activation", hf=activation("hidden_activation")),
        Field("ropes", hf=Form(_ropes), gguf=Form(_gguf_ropes, rope_entries)),
        Field("layers.window", hf=Form(_windows), gguf=Form(_gguf_windows, _gguf_window_entries)),
        Field("layers.rope", hf=Form(_rope_of_layers), gguf=Form(_rope_of_layers)),
    ),
    hf_types=("modernbert",),
    hf_class="ModernBertModel",
    hf_defaults={"hidden_activation": "gelu"},
    hf_refused={
        "attention_bias": "biases of attention are not supported",
        "mlp_bias": "biases of the MLP are not supported",
        "norm_bias": "biases of norms are not supported",
    },
    hf_names=TensorNames(
        embedding="model.embeddings.tok_embeddings",
        embedding_norm="model.embeddings.norm",
        layer="model.layers.{}.",
        attention_norm="attn_norm",
        qkv=("attn.Wqkv",),
        output="attn.Wo",
        mlp_norm="mlp_norm",
        up=("mlp.Wi",),
        down="mlp.Wo",
        final_norm="model.final_norm",
        head="",
    ),
    hf_head=(HeadLayer("head.dense", "gelu", "head.norm", bias=False), HeadLayer("classifier")),
    gguf_architectures=("modern-bert",),
    gguf_implied={"activation": "gelu"},
    gguf_names=replace(GGUF_LLAMA, embedding_norm="token_embd_norm", qkv=("attn_qkv",), up=("ffn_up",)),
)
