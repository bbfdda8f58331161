"""The table of a decoder like Llama: RMS norms, rope, a gated MLP. Families change single fields of it."""

from __future__ import annotations

import math
from typing import Any

from bifolio.errors import UnsupportedModelError
from bifolio.model.description import Reading, Values, Writing
from bifolio.model.fields import Field, Form, Key
from bifolio.model.gguf.end_tokens import end_ids
from bifolio.model.gguf.rope_fields import read_rope, rope_entries
from bifolio.model.huggingface.rope_fields import read_ropes, ropes_by_kind, written_ropes
from bifolio.model.window_fields import EVERY_LAYER, GGUF_WINDOWS, ropes_by_window

EMBEDDING = "token_embd.weight"
HEAD_SIZES = ("attention.key_length", "attention.value_length")
NORM_EPS = Field("norm_eps", hf=Key("layer_norm_eps", default=1e-5))  # of families with layer norms
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "relu2",
}


# -- fields of their own form -----------------------------------------------------------------------------------------
def activation(*keys: str, **spellings: str) -> Form:
    """The name of the activation under one of several keys of config.json; `spellings` of a family come first."""
    known = {**ACTIVATIONS, **spellings}

    def read(values: Reading) -> str:
        key = next((key for key in keys if values.json.get(key) is not None), keys[0])
        name = values.json.text(key, values.family.hf_defaults.get(keys[0], "silu"))
        if name not in known:
            supported = ", ".join(known)
            raise UnsupportedModelError(f"the activation {name!r} ({key}) is not supported; supported: {supported}")
        return known[name]

    def write(values: Writing) -> dict[str, str]:
        """In the usual spelling of the family, if it means the same."""
        names = values.family.hf_defaults.get(keys[0], "silu"), *known
        same = [name for name in names if known[name] == values["activation"]]
        if not same:
            raise values.refusal(f"the activation {values['activation']!r}")
        return {keys[0]: same[0]}

    return Form(read, write)


def one_bias(key: str) -> tuple[Field, ...]:
    """One key of config.json for the biases of attention and MLP."""
    return Field("qkv_bias", hf=key, optional=False), Field("mlp_bias", hf=None, default=lambda v: v["qkv_bias"])


def in_tensors(*names: str) -> Form:
    """Whether a layer of a GGUF file has one of these tensors."""
    return Form(lambda values: any(name in values.header.in_layers for name in names))


def usual_scale(values: Values) -> float:
    """The factor of scores of an architecture that does not say otherwise."""
    return 1 / math.sqrt(values["head_dim"])


def or_one(factor: float) -> float:
    """A factor of GGUF files, which is 0 where there is none."""
    return factor or 1.0


def inverse(factor: float) -> float:
    return 1 / factor


def stored_scale(key: str, default: float) -> Form:
    """The factor of scores under a key of config.json."""
    return Form(lambda v: v.json.number(key, default), lambda v: {key: v.config.scale})


def scale_entry(values: Writing, implied: float) -> dict[str, float]:
    """The factor of scores, where it is not the one that the architecture implies."""
    scale = values.config.scale
    return {} if math.isclose(scale, implied, rel_tol=1e-6) else {"attention.scale": scale}


def _check_scale(values: Writing) -> dict[str, Any]:
    if scale_entry(values, usual_scale(values)):
        raise values.refusal(f"attention_scale = {values.config.scale}")
    return {}


def _layer_count(values: Reading) -> int:
    """Layers after the last one are heads for multi-token prediction (`model.next_token_head`)."""
    header = values.header
    count = header.count(".block_count", least=1)
    if count > len(header.file.entries):
        raise header.fail(f"{count} layers cannot be made of {len(header.file.entries)} tensors")
    return count - header.count(".nextn_predict_layers", 0)


def _head_size(values: Reading) -> int:
    header = values.header
    size = header.count(".attention.key_length", values["hidden_size"] // values["num_heads"])
    if header.count(".attention.value_length", size) != size and not header.has(".attention.key_length_mla"):
        raise UnsupportedModelError(f"{header.path}: keys and values of different sizes are not supported")
    return size


def _epsilon_key(values: Values) -> str:
    return f"attention.layer_norm_{'' if values['norm'] == 'layer' else 'rms_'}epsilon"


def _token_ids(values: Reading) -> tuple[int, ...]:
    eos, key = values.json.get("eos_token_id"), "eos_token_id"
    if eos is None or isinstance(eos, list | tuple):
        return values.json.counts(key, least=-1)
    return (values.json.count(key, least=-1),)


def _write_token_ids(values: Writing) -> dict[str, Any]:
    eos = list(values["eos_token_ids"])
    return {"eos_token_id": eos[0] if len(eos) == 1 else eos or None}


# -- the table --------------------------------------------------------------------------------------------------------
DECODER = (
    Field("vocab_size", hf="vocab_size", gguf=Key("vocab_size", reader=lambda v: v.header.shape(EMBEDDING)[0])),
    Field("hidden_size", hf="hidden_size", gguf="embedding_length"),
    Field("num_layers", hf="num_hidden_layers", gguf=Key("block_count", reader=_layer_count)),
    Field("num_heads", hf="num_attention_heads", gguf="attention.head_count"),
    Field("num_kv_heads", hf="num_key_value_heads", gguf="attention.head_count_kv", default=lambda v: v["num_heads"]),
    Field(
        "head_dim",
        hf="head_dim",
        gguf=Form(_head_size, lambda v: dict.fromkeys(HEAD_SIZES, v["head_dim"])),
        default=lambda v: v["hidden_size"] // v["num_heads"],
    ),
    Field("intermediate_size", hf="intermediate_size", gguf=("feed_forward_length", "expert_feed_forward_length")),
    Field("max_position", hf=Key("max_position_embeddings", default=2048), gguf="context_length"),
    Field(
        "norm_eps",
        hf=Key("rms_norm_eps", default=1e-6),
        gguf=Form(lambda v: v.header.number(f".{_epsilon_key(v)}"), lambda v: {_epsilon_key(v): v["norm_eps"]}),
    ),
    Field("activation", hf=activation("hidden_act")),
    Field("qkv_bias", hf="attention_bias", gguf=in_tensors("attn_qkv.bias", "attn_q.bias"), optional=True),
    Field("output_bias", default=lambda v: v["qkv_bias"], gguf=in_tensors("attn_output.bias")),
    Field("mlp_bias", hf="mlp_bias", gguf=in_tensors("ffn_down.bias"), optional=True),
    Field("head_bias", gguf=Form(lambda v: v.header.has_tensor("output.bias"))),
    Field("tie_embeddings", hf="tie_word_embeddings", gguf=Form(lambda v: not v.header.has_tensor("output.weight"))),
    Field("ropes", hf=Form(read_ropes, written_ropes), gguf=Form(lambda v: (read_rope(v),), rope_entries)),
    Field("layers.rope", hf=Form(ropes_by_kind), gguf=Form(ropes_by_window)),
    Field("layers.window", hf=EVERY_LAYER, gguf=GGUF_WINDOWS),
    Field(
        "attention_scale",
        hf=Form(lambda v: 0.0, _check_scale),
        gguf=Form(lambda v: v.header.number(".attention.scale", 0.0), lambda v: scale_entry(v, usual_scale(v))),
    ),
    Field(
        "attention_softcap",
        hf=Key("attn_logit_softcapping", write=lambda cap: cap or None),
        gguf="attn_logit_softcapping",
        optional=True,
    ),
    Field(
        "logit_softcap",
        hf=Key("final_logit_softcapping", write=lambda cap: cap or None),
        gguf="final_logit_softcapping",
        optional=True,
    ),
    Field(
        "bos_token_id",
        hf="bos_token_id",
        gguf=Form(lambda v: v.header.token_id("tokenizer.ggml.bos_token_id", v["vocab_size"])),
    ),
    Field(
        "eos_token_ids", hf=Form(_token_ids, _write_token_ids), gguf=Form(lambda v: end_ids(v.header, v["vocab_size"]))
    ),
)
