"""GGUF metadata of a decoder → the fields of `ModelConfig` that most families share.

Fields that are missing in the metadata follow from the shapes and names of the tensors. A family (`model/families/`)
calls `decoder_from_gguf` with the fields in which it differs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, MoeConfig, RopeConfig
from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.reader import GgufFile, StringArray

# Tokens that end a turn or a text; many files declare only one of them as end of text.
MESSAGE_END = "<|end|>"
END_TOKENS = frozenset(
    (MESSAGE_END, "<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>",
     "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<turn|>", "<|tool_response>", "<|return|>", "<|call|>", "<|calls|>",
     "<|flush|>", "<end_of_utterance>", "<eos>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
     "<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<|repo_name|>", "<|fim_repo|>", "<reponame>", "<|file_sep|>")
)  # fmt: skip
# With both of one pair an answer has several messages: the end of a message does not end it.
SEVERAL_MESSAGES = (frozenset(("<|return|>", "<|call|>")), frozenset(("<|calls|>", "<|flush|>")))
END_NAMES = ("eos", "eot", "eom")  # end of text, of turn, of message: a file may declare one of each
_CONTROL = 3  # token type
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3  # scores of experts


def decoder_from_gguf(
    file: GgufFile, metadata: Metadata, architecture: str, *, window_period: int = 0, **overrides: Any
) -> ModelConfig:
    """A decoder with RMS norms, rope and a gated MLP; `overrides` are fields of `ModelConfig` that a family sets.

    Every `window_period`-th layer has no window, unless the file says otherwise.
    """
    fields = common_fields(file, metadata, architecture, window_period)
    return ModelConfig(
        **{
            **fields,
            "max_position": metadata.count(".context_length"),
            "norm_eps": metadata.number(
                f".attention.layer_norm_{'' if overrides.get('norm') == 'layer' else 'rms_'}epsilon"
            ),
            "ropes": (_rope(file, metadata, fields["head_dim"]),),
            **overrides,
        }
    )


def common_fields(file: GgufFile, metadata: Metadata, architecture: str, window_period: int = 0) -> dict[str, Any]:
    """Sizes, biases, windows and special tokens, which have the same keys in all families."""
    hidden_size, num_heads = metadata.count(".embedding_length"), metadata.count(".attention.head_count")
    num_layers = metadata.count(".block_count")
    if num_layers > len(file.entries):
        raise metadata.fail(f"{num_layers} layers cannot be made of {len(file.entries)} tensors")
    if not num_heads or not hidden_size:
        raise metadata.fail("the metadata declares zero heads or a hidden size of zero")
    head_dim = metadata.count(".attention.key_length", hidden_size // num_heads)
    own_values = metadata.count(".attention.value_length", head_dim) != head_dim
    if own_values and not metadata.has(".attention.key_length_mla"):
        raise UnsupportedModelError(f"{file.path}: keys and values of different sizes are not supported")
    vocab_size = matrix_rows(file, "token_embd.weight")
    return {
        "architecture": architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": metadata.count(".attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "intermediate_size": metadata.count(".feed_forward_length", 0) or metadata.count(".expert_feed_forward_length"),
        "qkv_bias": any(in_any_layer(file, num_layers, f"{name}.bias") for name in ("attn_qkv", "attn_q")),
        "output_bias": in_any_layer(file, num_layers, "attn_output.bias"),
        "mlp_bias": in_any_layer(file, num_layers, "ffn_down.bias"),
        "head_bias": "output.bias" in file.entries,
        "tie_embeddings": "output.weight" not in file.entries,
        "layer_window": _windows(metadata, num_layers, window_period),
        "attention_scale": metadata.number(".attention.scale", 0.0),
        "attention_softcap": metadata.number(".attn_logit_softcapping", 0.0),
        "logit_softcap": metadata.number(".final_logit_softcapping", 0.0),
        "bos_token_id": metadata.token_id("tokenizer.ggml.bos_token_id", vocab_size),
        "eos_token_ids": _end_ids(metadata, vocab_size),
    }


def experts_from_gguf(file: GgufFile, metadata: Metadata, **overrides: Any) -> MoeConfig | None:
    """Experts as the metadata and the tensors describe them; `overrides` are fields that the architecture implies."""
    count = metadata.count(".expert_count", 0)
    if not count:
        return None
    layers = metadata.count(".block_count")
    first = min(metadata.count(".leading_dense_block_count", 0), layers - 1)
    found = (n for n in range(first, layers) if f"blk.{n}.ffn_down_exps.weight" in file.entries)  # hybrids: not in all
    layer = f"blk.{next(found, first)}."
    shared = file.entries.get(layer + "ffn_up_shexp.weight")
    expert = file.entries.get(layer + "ffn_down_exps.weight")
    if expert is None or len(expert.shape) != 3:
        raise ModelFileError(
            f"{file.path}: the experts {layer}ffn_down_exps.weight are missing: convert the model again"
        )
    scoring = metadata.count(".expert_gating_func", _SOFTMAX)
    if scoring > _SOFTMAX_OF_CHOSEN:
        raise UnsupportedModelError(f"{file.path}: the scores of experts are of the kind {scoring}, which is not known")
    fields: dict[str, Any] = {
        "num_experts": count,
        "top_k": metadata.count(".expert_used_count"),
        "expert_size": metadata.count(".expert_feed_forward_length", expert.shape[-1]),
        "scoring": "sigmoid" if scoring == _SIGMOID else "softmax",
        "renormalise": metadata.flag(".expert_weights_norm", False),
        "scale": metadata.number(".expert_weights_scale", 0.0) or 1.0,
        "selection_bias": layer + "exp_probs_b.bias" in file.entries,
        "num_groups": metadata.count(".expert_group_count", 1),
        "top_groups": metadata.count(".expert_group_used_count", 1),
        "router_bias": layer + "ffn_gate_inp.bias" in file.entries,
        "expert_bias": layer + "ffn_down_exps.bias" in file.entries,
        "shared_size": 0 if shared is None else shared.shape[0],
        "dense_layers": tuple(range(first)),
    }
    return MoeConfig(**{**fields, **overrides})


def in_any_layer(file: GgufFile, num_layers: int, name: str) -> bool:
    """Whether a layer has this tensor; those of a hybrid model differ."""
    return any(f"blk.{layer}.{name}" in file.entries for layer in range(num_layers))


def matrix_rows(file: GgufFile, name: str) -> int:
    """The number of rows of a matrix that every file of the family contains."""
    entry = file.entries.get(name)
    if entry is None or len(entry.shape) != 2:
        raise ModelFileError(f"{file.path}: the matrix {name!r} is missing: the file is not a complete model")
    return entry.shape[0]


def _windows(metadata: Metadata, num_layers: int, default_period: int) -> tuple[int | None, ...]:
    window = metadata.count(".attention.sliding_window", 0)
    if not window:
        return ()
    pattern = metadata.array(".attention.sliding_window_pattern")
    if pattern is not None:
        if len(pattern) != num_layers:
            raise metadata.fail(f"the sliding window pattern has {len(pattern)} entries for {num_layers} layers")
        return tuple(window if has_window else None for has_window in pattern.tolist())
    period = metadata.count(".attention.sliding_window_pattern", default_period)
    return tuple(None if period and (layer + 1) % period == 0 else window for layer in range(num_layers))


def _rope(file: GgufFile, metadata: Metadata, head_dim: int) -> RopeConfig:
    kind = metadata.text(f"{metadata.architecture}.rope.scaling.type", "linear")
    factor = metadata.number(".rope.scaling.factor", metadata.number(".rope.scale_linear", 0.0)) or 1.0
    rotary_dim = metadata.count(".rope.dimension_count", head_dim)
    attention_factor = metadata.number(".rope.scaling.attn_factor", 1.0)
    long, short = (
        _factors(file, "rope_factors_long.weight", rotary_dim),
        _factors(file, "rope_factors_short.weight", rotary_dim),
    )
    if factor <= 0:
        raise metadata.fail(f"the rope scaling factor must be positive, not {factor}")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise UnsupportedModelError(f"{file.path}: rope scaling {kind!r} is not supported")
    common: dict[str, Any] = {"theta": metadata.number(".rope.freq_base", 10000.0), "rotary_dim": rotary_dim}
    original = metadata.count(".rope.scaling.original_context_length", metadata.count(".context_length"))
    if long:
        return RopeConfig(
            **common,
            scaling="longrope",
            factor=metadata.count(".context_length") / max(original, 1),
            original_max_position=original,
            attention_factor=attention_factor,
            frequency_factors=long,
            frequency_factors_short=short,
        )
    common["frequency_factors"] = _factors(file, "rope_freqs.weight", rotary_dim)
    if kind == "yarn":
        return RopeConfig(
            **common,
            scaling="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=metadata.number(".rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=metadata.number(".rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=attention_factor * yarn_attention_factor(factor),
        )
    linear = kind == "linear" and factor != 1.0
    return RopeConfig(**common, scaling="linear" if linear else "none", factor=factor if linear else 1.0)


def yarn_attention_factor(factor: float) -> float:
    """Yarn's default factor on cos and sin; GGUF stores the ratio to it."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factors(file: GgufFile, name: str, rotary_dim: int) -> tuple[float, ...]:
    """Frequency divisors, if the file has a tensor of them."""
    if name not in file.entries:
        return ()
    values = file.tensor(name).dequantize().reshape(-1)
    if len(values) != rotary_dim // 2 or not (np.isfinite(values) & (values > 0)).all():
        raise ModelFileError(f"{file.path}: {name!r} must hold {rotary_dim // 2} positive numbers")
    return tuple(float(value) for value in values)


def _end_ids(metadata: Metadata, vocab_size: int) -> tuple[int, ...]:
    """End-of-text ids: those declared by the file, and control tokens with a known end-of-text name."""
    named = [metadata.token_id(f"tokenizer.ggml.{name}_token_id", vocab_size) for name in END_NAMES]
    tokens, types = metadata.strings("tokenizer.ggml.tokens"), metadata.array("tokenizer.ggml.token_type")
    found = [token_id for token_id in named if token_id is not None]
    if isinstance(tokens, StringArray) and types is not None and len(types) == len(tokens):
        known = {text.encode(): text for text in END_TOKENS}
        controls = np.flatnonzero(types[:vocab_size] == _CONTROL).tolist()
        ends = {known[raw]: index for index in controls if (raw := tokens.raw(index)) in known}
        if any(pair <= ends.keys() for pair in SEVERAL_MESSAGES):
            ends.pop(MESSAGE_END, None)
        found += ends.values()
    return tuple(dict.fromkeys(found))
