"""RWKV-7 (Goose): a matrix of state for each head, and mixes of each token with the one before it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.decoder_fields import activation
from bifolio.model.description import Reading, Values, Writing
from bifolio.model.export import NamedTensor
from bifolio.model.families.family import Family
from bifolio.model.families.mamba import LONGEST, of_layers
from bifolio.model.fields import Field, Form, Key
from bifolio.model.recurrent_tensors import RecurrentNames
from bifolio.model.rwkv_tensors import LowRankNames, RwkvNames
from bifolio.model.tensor_names import GGUF_LLAMA, TensorNames

GGUF_NORM_EPS = 64e-5  # of the norms of heads, which files do not store
NETWORK: dict[str, Any] = {"norm": "layer", "gated_mlp": False, "embedding_norm": True, "num_heads": 1,
                           "num_kv_heads": 1, "head_dim": 16, "ropes": (), "layers.rope": (), "recurrent.kind": "rwkv",
                           "recurrent.width": 2, "recurrent.has_norm": False}  # fmt: skip
RANKS = {"decay_low_rank_dim": 2.5, "a_low_rank_dim": 2.5, "gate_low_rank_dim": 5.0, "v_low_rank_dim": 1.7}
GGUF_RANKS = tuple(f"attention.{name}_lora_rank" for name in ("decay", "iclr", "gate", "value_residual_mix"))
HF_MIXES = tuple(f"attn.x_{name}" for name in "rwkvag")
FIRST_RATE, FIRST_MIX = "blk.0.time_mix_a", "blk.0.time_mix_v"


def intermediate_size(values: Reading) -> int:
    size = values["hidden_size"] * values.json.number("hidden_ratio", 4.0)
    return values.json.count("intermediate_size", 32 * math.ceil(size / 32))


def head_size(values: Reading) -> int:
    """The keys and the values of a head."""
    json = values.json
    if json.get("head_dim") is None and json.get("num_heads") is not None:
        return int(values["hidden_size"]) // json.count("num_heads")
    return json.count("head_dim", 64)


def heads(values: Values) -> int:
    hidden, size = values["hidden_size"], values["recurrent.key_size"]
    if hidden % size:
        raise UnsupportedModelError(f"{hidden} values of RWKV-7 cannot be shared by heads of {size}")
    return int(hidden // size)


def ranks(values: Reading) -> tuple[int, ...]:
    """Of the low-rank products of decay, rate, gate and the mix of values; null: by the size of the model."""
    found = []
    for key, factor in RANKS.items():
        size = 1.0 if key.startswith("gate") else values["recurrent.key_size"] / 64
        usual = max(32, round(factor * math.sqrt(values["hidden_size"]) * size / 32) * 32)
        found.append(values.json.count(key, usual))
    return tuple(found)


def write_heads(values: Writing) -> dict[str, int]:
    return {"head_dim": values["recurrent.key_size"], "num_heads": values["recurrent.heads"]}


def value_size(values: Reading) -> int:
    """Layers may have more values than keys; they are refused."""
    found, size = values.json.get("value_dim"), values["hidden_size"]
    if found is not None and any(value != size for value in (found if isinstance(found, list) else [found])):
        raise UnsupportedModelError(f"{values.json.path}: RWKV-7 with a value_dim other than {size} is not supported")
    return int(values["recurrent.key_size"])


def write_values(values: Writing) -> dict[str, list[int]]:
    return {"value_dim": [values["hidden_size"]] * len(values.layers)}


def with_unread_mix(tensors: Iterator[NamedTensor], config: ModelConfig) -> Iterator[NamedTensor]:
    """The tensors of a file: other programs need a mix of values of the first layer too, which they do not read."""
    for tensor in tensors:
        yield tensor
        if tensor.name.startswith(FIRST_RATE):
            yield replace(tensor, name=tensor.name.replace(FIRST_RATE, FIRST_MIX))


FAMILY = Family(
    name="rwkv7",
    network=NETWORK,
    fields=(
        Field("layers.attention", default=of_layers(False)),
        Field("layers.recurrent", default=of_layers(True)),
        Field("intermediate_size", hf=Key("intermediate_size", reader=intermediate_size)),
        Field("max_position", hf=Key("max_position_embeddings", default=LONGEST)),
        Field("norm_eps", hf=Key("norm_eps", default=1e-5)),
        Field("norm_bias", hf=Key("norm_bias", default=True), optional=True),
        Field("activation", hf=activation("hidden_act", sqrelu="relu2")),
        Field("recurrent.key_size", hf=Form(head_size, write_heads), gguf="wkv.head_size"),
        Field("recurrent.value_size", hf=Form(value_size, write_values), default=lambda v: v["recurrent.key_size"]),
        Field("recurrent.heads", default=heads),
        Field("recurrent.groups", default=heads),
        Field("recurrent.channels", default=lambda v: 2 * v["hidden_size"]),
        Field("recurrent.norm_eps", hf=Key((), default=lambda v: v["recurrent.key_size"] * v["norm_eps"]),
              default=GGUF_NORM_EPS),
        Field(
            "recurrent.ranks",
            hf=Form(ranks, lambda v: dict(zip(RANKS, v["recurrent.ranks"], strict=True))),
            gguf=Form(
                lambda v: tuple(v.header.count(f".{key}", least=1) for key in GGUF_RANKS),
                lambda v: dict(zip(GGUF_RANKS, v["recurrent.ranks"], strict=True)),
            ),
        ),
    ),
    hf_types=("rwkv7",),
    hf_class="RWKV7ForCausalLM",
    hf_defaults={"hidden_act": "sqrelu", "decay_low_rank_dim": 64, "gate_low_rank_dim": 128, "a_low_rank_dim": 64,
                 "v_low_rank_dim": 16, "bos_token_id": 1, "eos_token_id": 2},
    hf_implied={"qkv_bias": False, "output_bias": False, "mlp_bias": False, "layers.window": ()},
    hf_needed={"norm_first": True},
    hf_refused={"attn": "RWKV-7 with layers of attention is not supported"},
    hf_names=TensorNames(
        embedding="model.embeddings",
        embedding_norm="model.layers.0.pre_norm",
        layer="model.layers.{}.",
        attention_norm="attn_norm",
        qkv=(),
        output="",
        mlp_norm="ffn_norm",
        up=("ffn.key",),
        down="ffn.value",
        final_norm="model.norm",
        head="lm_head",
        recurrent=RecurrentNames(
            rwkv=RwkvNames(
                shift=HF_MIXES,
                query="attn.r_proj",
                key="attn.k_proj",
                value="attn.v_proj",
                output="attn.o_proj",
                factors=("attn.k_k", "attn.k_a", "attn.r_k"),
                norm="attn.g_norm",
                decay=LowRankNames("attn.w_lora.lora.0", "attn.w_lora.lora.2", "attn.w_lora.lora.2.bias"),
                rate=LowRankNames("attn.a_lora.lora.0", "attn.a_lora.lora.2", "attn.a_lora.lora.2.bias"),
                gate=LowRankNames("attn.g_lora.lora.0", "attn.g_lora.lora.2"),
                mix=LowRankNames("attn.v_lora.lora.0", "attn.v_lora.lora.2", "attn.v_lora.lora.2.bias"),
                mlp_shift="ffn.x_k",
                bonus_by_head=True,
            )
        ),
    ),
    gguf_architectures=("rwkv7",),
    gguf_implied={"activation": "relu2"},
    gguf_written={"attention.head_count": 0},
    gguf_tensors=with_unread_mix,
    gguf_names=replace(
        GGUF_LLAMA,
        embedding_norm="token_embd_norm",
        mlp_norm="attn_norm_2",
        up=("channel_mix_key",),
        down="channel_mix_value",
        recurrent=RecurrentNames(
            rwkv=RwkvNames(
                shift=("time_mix_lerp_fused.weight",),
                query="time_mix_receptance",
                key="time_mix_key",
                value="time_mix_value",
                output="time_mix_output",
                factors=("time_mix_k_k.weight", "time_mix_k_a.weight", "time_mix_r_k.weight"),
                norm="time_mix_ln",
                decay=LowRankNames("time_mix_w1", "time_mix_w2", "time_mix_w0.weight"),
                rate=LowRankNames("time_mix_a1", "time_mix_a2", "time_mix_a0.weight"),
                gate=LowRankNames("time_mix_g1", "time_mix_g2"),
                mix=LowRankNames("time_mix_v1", "time_mix_v2", "time_mix_v0.weight"),
                mlp_shift="channel_mix_lerp_k.weight",
            )
        ),
    ),
)  # fmt: skip
