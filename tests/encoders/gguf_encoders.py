"""GGUF files of encoders, written by the `gguf` package from models of transformers under the names of llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from encoder_models import SPECIAL, VOCABULARY

SPACE = "▁"
NORMAL, CONTROL = 1, 3
MEAN, CLS, LAST, RANK = 1, 2, 3, 4
LAYER = r"(?:encoder\.)?layers?\.(\d+)\."
NAMES: dict[str, Mapping[str, str]] = {  # patterns of names without the base model, by architecture
    "bert": {
        r"embeddings\.word_embeddings": "token_embd",
        r"embeddings\.position_embeddings": "position_embd",
        r"embeddings\.token_type_embeddings": "token_types",
        r"embeddings\.LayerNorm": "token_embd_norm",
        LAYER + r"attention\.self\.query": r"blk.\1.attn_q",
        LAYER + r"attention\.self\.key": r"blk.\1.attn_k",
        LAYER + r"attention\.self\.value": r"blk.\1.attn_v",
        LAYER + r"attention\.output\.dense": r"blk.\1.attn_output",
        LAYER + r"attention\.output\.LayerNorm": r"blk.\1.attn_output_norm",
        LAYER + r"intermediate\.dense": r"blk.\1.ffn_up",
        LAYER + r"output\.dense": r"blk.\1.ffn_down",
        LAYER + r"output\.LayerNorm": r"blk.\1.layer_output_norm",
        r"pooler\.dense|classifier\.dense": "cls",
        r"classifier(?:\.out_proj)?": "cls.output",
    },
    "nomic-bert": {
        r"embeddings\.word_embeddings": "token_embd",
        r"embeddings\.token_type_embeddings": "token_types",
        r"embeddings\.LayerNorm": "token_embd_norm",
        LAYER + r"self_attn\.q_proj": r"blk.\1.attn_q",
        LAYER + r"self_attn\.k_proj": r"blk.\1.attn_k",
        LAYER + r"self_attn\.v_proj": r"blk.\1.attn_v",
        LAYER + r"self_attn\.o_proj": r"blk.\1.attn_output",
        LAYER + r"post_attention_layernorm": r"blk.\1.attn_output_norm",
        LAYER + r"mlp\.gate_proj": r"blk.\1.ffn_gate",
        LAYER + r"mlp\.up_proj": r"blk.\1.ffn_up",
        LAYER + r"mlp\.down_proj": r"blk.\1.ffn_down",
        LAYER + r"post_mlp_layernorm": r"blk.\1.layer_output_norm",
    },
    "modern-bert": {
        r"embeddings\.tok_embeddings": "token_embd",
        r"embeddings\.norm": "token_embd_norm",
        LAYER + r"attn_norm": r"blk.\1.attn_norm",
        LAYER + r"attn\.Wqkv": r"blk.\1.attn_qkv",
        LAYER + r"attn\.Wo": r"blk.\1.attn_output",
        LAYER + r"mlp_norm": r"blk.\1.ffn_norm",
        LAYER + r"mlp\.Wi": r"blk.\1.ffn_up",
        LAYER + r"mlp\.Wo": r"blk.\1.ffn_down",
        r"final_norm": "output_norm",
        r"head\.dense": "cls",
        r"head\.norm": "cls.norm",
        r"classifier": "cls.output",
    },
}
NAMES["jina-bert-v2"] = {
    **{old: new for old, new in NAMES["bert"].items() if "intermediate" not in old},
    LAYER + r"mlp\.gated_layers": r"blk.\1.ffn_up",
    LAYER + r"mlp\.wo": r"blk.\1.ffn_down",
    LAYER + r"mlp\.layernorm": r"blk.\1.layer_output_norm",
}
BASES = ("bert.", "roberta.", "nomic_bert.", "model.")


def gguf_tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """The tensors of a model by their names in files; NomicBERT's query, key and value are joined."""
    found: dict[str, np.ndarray] = {}
    for name, value in model.state_dict().items():
        plain, _, kind = next((name.removeprefix(b) for b in BASES if name.startswith(b)), name).rpartition(".")
        if plain.startswith("pooler.") and not hasattr(model, "classifier"):
            continue
        (own,) = {re.sub(old, new, plain) for old, new in NAMES[architecture].items() if re.fullmatch(old, plain)}
        found[f"{own}.{kind}"] = value.float().numpy()
    if architecture == "nomic-bert":
        for layer in range(model.config.num_hidden_layers):
            parts = [found.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
            found[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
    return found


def write_encoder(
    path: Path,
    model: Any,
    architecture: str,
    pooling: int | None = MEAN,
    *,
    offset: int = 0,  # rows of the position table that belong to padding
    labels: Sequence[str] = (),
    vocabulary: Sequence[str] = VOCABULARY,
    special: Sequence[str] = SPECIAL,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,  # of matrices
    split: bool = False,  # gate and up of the MLP
) -> Path:
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings - offset)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.norm_eps if architecture == "modern-bert" else config.layer_norm_eps)
    writer.add_causal_attention(False)
    if architecture == "nomic-bert":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "modern-bert":
        ropes = config.rope_parameters
        writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
        writer.add_float32("modern-bert.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.local_attention)
        writer.add_uint32("modern-bert.attention.sliding_window_pattern", 2)
    if pooling is not None:
        writer.add_uint32(f"{architecture}.pooling_type", pooling)
    if labels:
        writer.add_array(f"{architecture}.classifier.output_labels", list(labels))
    add_word_pieces(writer, vocabulary, special)
    tensors = gguf_tensors(model, architecture)
    for name in [name for name in tensors if split and ".ffn_up." in name]:
        tensors[name.replace("ffn_up", "ffn_gate")], tensors[name] = np.split(tensors[name], 2)
    for name, value in tensors.items():
        value = value[offset:] if name == "position_embd.weight" else value
        is_matrix = value.ndim == 2 and name.startswith("blk.")
        stored = gguf.quants.quantize(value, kind) if is_matrix and kind != 0 else value
        writer.add_tensor(name, np.ascontiguousarray(stored), raw_dtype=kind if is_matrix and kind != 0 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_word_pieces(writer: gguf.GGUFWriter, vocabulary: Sequence[str], special: Sequence[str]) -> None:
    def spelled(token: str) -> str:
        if token in special or (token.startswith("[") and token.endswith("]")):
            return token
        return token[2:] if token.startswith("##") else SPACE + token

    ids = {token: index for index, token in enumerate(vocabulary)}
    tokens = [token if ids[token] == index else f"[unused{index}]" for index, token in enumerate(vocabulary)]
    writer.add_tokenizer_model("bert")
    writer.add_token_list([spelled(token) for token in tokens])
    writer.add_token_types([CONTROL if token in special else NORMAL for token in vocabulary])
    writer.add_uint32("tokenizer.ggml.cls_token_id", ids["[CLS]"])
    writer.add_uint32("tokenizer.ggml.seperator_token_id", ids["[SEP]"])
    writer.add_uint32("tokenizer.ggml.unknown_token_id", ids["[UNK]"])
    writer.add_uint32("tokenizer.ggml.padding_token_id", ids["[PAD]"])
