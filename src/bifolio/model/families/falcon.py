"""Falcon 7B and 40B: attention and MLP side by side on one layer norm or on one each, few key/value heads.

Folders store the queries of each key/value head, its key and its value in one matrix, head by head; GGUF files store
all queries, all keys and all values one behind the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.errors import UnsupportedModelError
from bifolio.model.families.family import Family
from bifolio.model.gguf.decoder_config import decoder_from_gguf
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile
from bifolio.model.huggingface.decoder_config import Raw, decoder_from_hf, decoder_to_hf, write_activation
from bifolio.model.stored_form import Joined, StoredForm, joined_heads, reading, writing
from bifolio.model.tensor_names import GGUF_LLAMA, HF_LLAMA

NETWORK: dict[str, Any] = {"norm": "layer", "gated_mlp": False, "parallel_block": True}
DEFAULTS = {"activation": "gelu", "layer_norm_epsilon": 1e-5, "multi_query": True, "parallel_attn": True,
            "tie_word_embeddings": True, "bos_token_id": 11, "eos_token_id": 11}  # fmt: skip
HF_NAMES = replace(
    HF_LLAMA,
    embedding="transformer.word_embeddings",
    layer="transformer.h.{}.",
    qkv=("self_attention.query", "self_attention.key", "self_attention.value"),
    output="self_attention.dense",
    mlp_norm="ln_mlp",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    final_norm="transformer.ln_f",
)
SECOND_NORM = "attn_norm_2"


def config_from_hf(raw: Raw, name: str) -> ModelConfig:
    raw = {**DEFAULTS, **raw}
    if raw.get("alibi"):
        raise UnsupportedModelError("Falcon with alibi instead of rope (Falcon-RW) is not supported")
    if not raw["parallel_attn"]:
        raise UnsupportedModelError("Falcon with the MLP behind attention (parallel_attn = false) is not supported")
    heads, d = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    is_new, bias = bool(raw.get("new_decoder_architecture")), bool(raw.get("bias"))
    return decoder_from_hf(
        {**raw, "intermediate_size": raw.get("ffn_hidden_size") or 4 * d, "hidden_act": raw["activation"]},
        name,
        num_kv_heads=int(raw.get("num_kv_heads") or heads) if is_new else 1 if raw["multi_query"] else heads,
        head_dim=d // heads,
        norm_eps=float(raw["layer_norm_epsilon"]),
        parallel_norms=is_new and int(raw.get("num_ln_in_parallel_attn") or 2) == 2,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        **NETWORK,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """All models have the form of Falcon-40B, which includes that of the others."""
    fields = decoder_to_hf(config)
    del fields["head_dim"]  # the class of transformers computes it
    return {
        **fields,
        "num_kv_heads": config.num_kv_heads,
        "ffn_hidden_size": config.intermediate_size,
        "layer_norm_epsilon": config.norm_eps,
        "activation": write_activation(config, "gelu"),
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if config.parallel_norms else 1,
        "bias": config.qkv_bias,
        "alibi": False,
    }


def folder_form(config: ModelConfig) -> StoredForm:
    groups, queries = config.num_kv_heads, config.num_heads // config.num_kv_heads
    rows = np.arange(config.query_size + 2 * config.kv_size).reshape(groups, queries + 2, config.head_dim)
    spans = rows[:, :-2], rows[:, -2], rows[:, -1]
    parts = tuple((name, span.reshape(-1)) for name, span in zip(HF_NAMES.qkv, spans, strict=True))
    joined = Joined("self_attention.query_key_value", parts)
    return StoredForm((joined,), renamed(("input_layernorm", "ln_attn")) if config.parallel_norms else ())


def config_from_gguf(file: GgufFile, metadata: Metadata, name: str) -> ModelConfig:
    two = f"blk.0.{SECOND_NORM}.weight" in file.entries
    return decoder_from_gguf(file, metadata, name, activation="gelu", parallel_norms=two, **NETWORK)


def gguf_form(config: ModelConfig) -> StoredForm:
    """The first norm of a file is that of the MLP, where attention has a second one."""
    two = renamed(("attn_norm", SECOND_NORM), ("ffn_norm", "attn_norm")) if config.parallel_norms else ()
    return replace(joined_heads(config, "attn_qkv", GGUF_LLAMA.qkv), renamed=two)


def renamed(*names: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    """The weights and the biases of norms under other names."""
    return tuple((f"{ours}.{end}", f"{theirs}.{end}") for ours, theirs in names for end in ("weight", "bias"))


FAMILY = Family(
    name="falcon",
    hf_types=("falcon",),
    hf_class="FalconForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    hf_names=HF_NAMES,
    folder_source=reading(folder_form),
    folder_tensors=writing(folder_form),
    folder_form=folder_form,
    gguf_architectures=("falcon",),
    written_as="falcon",
    config_from_gguf=config_from_gguf,
    gguf_names=replace(GGUF_LLAMA, up=("ffn_up",)),
    gguf_source=reading(gguf_form),
    gguf_tensors=writing(gguf_form),
    gguf_activation="gelu",
)
