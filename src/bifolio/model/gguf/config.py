"""The metadata of a GGUF file → `ModelConfig`. What the metadata leaves open, the tensors' shapes and names decide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import ConfigError, ModelFileError, UnsupportedModelError
from bifolio.model.gguf.reader import GgufFile, StringArray, Value

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "gpt2", "phi3")
# Files of this architecture keep the rows of queries and keys in the order for rope on neighbouring pairs.
INTERLEAVED = ("llama",)
GEMMA_WINDOW_PERIOD = 6  # five layers with a window, then one without
GEMMA_LARGEST_LAYERS = 62  # the 27B model scales attention by hidden_size / heads instead of the head size

# Tokens that end a turn or a text, where a file names only one of them as its end of text.
END_TOKENS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "<EOT>"}
)
END_NAMES = ("eos", "eot", "eom")  # end of text, of a turn, of a message: a file may name one of each
_CONTROL = 3  # token type


class Metadata:
    """Typed access to the entries of a file; what is missing or of the wrong kind is a named error."""

    def __init__(self, values: Mapping[str, Value], path: Path) -> None:
        self._values = values
        self.path = path
        self.architecture = self.text("general.architecture")

    def fail(self, message: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {message}")

    def _get(self, key: str) -> Any:
        """`.name` stands for a key of the file's architecture."""
        return self._values.get(self.architecture + key if key.startswith(".") else key)

    def has(self, key: str) -> bool:
        return self._get(key) is not None

    def text(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.fail(f"the metadata {key!r} is missing or not a string")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number; one that is given for every layer must be the same for all."""
        value = self._get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, np.ndarray):
            distinct = set(value.tolist())
            if len(distinct) != 1:
                raise UnsupportedModelError(f"{self.path}: {key!r} differs between layers")
            value = distinct.pop()
        if type(value) is not int or not 0 <= value < 2**48:
            raise self.fail(f"the metadata {key!r} is {value!r}, not a whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self.fail(f"the metadata {key!r} is {value!r}, not a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(f"the metadata {key!r} is {value!r}, not true or false")
        return value

    def array(self, key: str) -> np.ndarray | None:
        value = self._get(key)
        return value if isinstance(value, np.ndarray) else None

    def strings(self, key: str) -> Sequence[str] | None:
        value = self._get(key)
        return value if isinstance(value, StringArray | list) else None

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """The id of a special token, or None when there is none or it is outside of the vocabulary."""
        value = self._get(key)
        return value if type(value) is int and 0 <= value < vocab_size else None


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Describe the network in the file."""
    metadata = Metadata(file.metadata, file.path)
    if metadata.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: the architecture {metadata.architecture!r} is not supported; "
            f"supported are: {', '.join(ARCHITECTURES)}"
        )
    if metadata.count("split.count", 1) > 1:
        raise UnsupportedModelError(f"{file.path}: this is one part of a model: join the parts with llama-gguf-split")
    if metadata.count(".expert_count", 0):
        raise UnsupportedModelError(f"{file.path}: mixtures of experts are not supported")
    try:
        return _config(file, metadata)
    except ConfigError as error:
        raise ModelFileError(f"{file.path}: {error}") from error


def _config(file: GgufFile, metadata: Metadata) -> ModelConfig:
    architecture = metadata.architecture
    hidden_size, num_heads = metadata.count(".embedding_length"), metadata.count(".attention.head_count")
    num_layers = metadata.count(".block_count")
    if num_layers > len(file.entries):
        raise metadata.fail(f"{num_layers} layers cannot be made of {len(file.entries)} tensors")
    if not num_heads or not hidden_size:
        raise metadata.fail("the metadata says that there are no heads or no hidden values")
    head_dim = metadata.count(".attention.key_length", hidden_size // num_heads)
    if metadata.count(".attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: keys and values of different sizes are not supported")
    gpt2, gemma = architecture == "gpt2", architecture == "gemma3"
    vocab_size = _rows(file, "token_embd.weight")
    windows = _windows(metadata, num_layers)
    ropes, layer_rope = ((), ()) if gpt2 else _ropes(file, metadata, head_dim, windows)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=metadata.count(".attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=metadata.count(".feed_forward_length"),
        max_position=_rows(file, "position_embd.weight") if gpt2 else metadata.count(".context_length"),
        norm="layer" if gpt2 else "rms",
        norm_eps=metadata.number(".attention.layer_norm_epsilon" if gpt2 else ".attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh" if gpt2 or gemma else "silu",
        gated_mlp=not gpt2,
        qkv_bias=any(f"blk.0.{name}.bias" in file.entries for name in ("attn_qkv", "attn_q")),
        output_bias="blk.0.attn_output.bias" in file.entries,
        mlp_bias="blk.0.ffn_down.bias" in file.entries,
        qk_norm=architecture in ("qwen3", "gemma3"),
        post_norms=gemma,
        tie_embeddings="output.weight" not in file.entries,
        learned_positions=gpt2,
        ropes=ropes,
        rope_interleaved=architecture in INTERLEAVED,
        layer_rope=layer_rope,
        layer_window=windows,
        embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
        attention_scale=_attention_scale(metadata, hidden_size, num_heads, num_layers),
        logit_softcap=metadata.number(".final_logit_softcapping", 0.0),
        bos_token_id=metadata.token_id("tokenizer.ggml.bos_token_id", vocab_size),
        eos_token_ids=_end_ids(metadata, vocab_size),
    )


def _rows(file: GgufFile, name: str) -> int:
    entry = file.entries.get(name)
    if entry is None or len(entry.shape) != 2:
        raise ModelFileError(f"{file.path}: the matrix {name!r} is missing: the file holds no whole model")
    return entry.shape[0]


def _attention_scale(metadata: Metadata, hidden_size: int, num_heads: int, num_layers: int) -> float:
    """0 stands for the usual 1/sqrt(head size)."""
    largest_gemma = metadata.architecture == "gemma3" and num_layers == GEMMA_LARGEST_LAYERS
    return metadata.number(".attention.scale", (hidden_size / num_heads) ** -0.5 if largest_gemma else 0.0)


def _windows(metadata: Metadata, num_layers: int) -> tuple[int | None, ...]:
    window = metadata.count(".attention.sliding_window", 0)
    if not window:
        return ()
    pattern = metadata.array(".attention.sliding_window_pattern")
    if pattern is not None:
        if len(pattern) != num_layers:
            raise metadata.fail(f"the pattern of windows has {len(pattern)} entries for {num_layers} layers")
        return tuple(window if has_window else None for has_window in pattern.tolist())
    default = GEMMA_WINDOW_PERIOD if metadata.architecture == "gemma3" else 0
    period = metadata.count(".attention.sliding_window_pattern", default)
    return tuple(None if period and (layer + 1) % period == 0 else window for layer in range(num_layers))


def _ropes(
    file: GgufFile, metadata: Metadata, head_dim: int, windows: tuple[int | None, ...]
) -> tuple[tuple[RopeConfig, ...], tuple[int, ...]]:
    """Gemma rotates layers with a window by a base of their own and without scaling."""
    rope = _rope(file, metadata, head_dim)
    if metadata.architecture != "gemma3" or not windows:
        return (rope,), ()
    local = RopeConfig(metadata.number(".rope.freq_base_swa", 10000.0), rope.rotary_dim)
    return (rope, local), tuple(int(window is not None) for window in windows)


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
    """What yarn multiplies cos and sin by when a file says nothing else; GGUF stores the deviation from it."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _factors(file: GgufFile, name: str, rotary_dim: int) -> tuple[float, ...]:
    """Divisors of the frequencies, where the file has them as a tensor."""
    if name not in file.entries:
        return ()
    values = file.tensor(name).dequantize().reshape(-1)
    if len(values) != rotary_dim // 2 or not (np.isfinite(values) & (values > 0)).all():
        raise ModelFileError(f"{file.path}: {name!r} must hold {rotary_dim // 2} positive numbers")
    return tuple(float(value) for value in values)


def _end_ids(metadata: Metadata, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a text: those that the file names, and control tokens with a name that says so."""
    named = [metadata.token_id(f"tokenizer.ggml.{name}_token_id", vocab_size) for name in END_NAMES]
    tokens, types = metadata.strings("tokenizer.ggml.tokens"), metadata.array("tokenizer.ggml.token_type")
    found = [token_id for token_id in named if token_id is not None]
    if isinstance(tokens, StringArray) and types is not None and len(types) == len(tokens):
        wanted = {text.encode() for text in END_TOKENS}
        controls = np.flatnonzero(types[:vocab_size] == _CONTROL).tolist()
        found += [index for index in controls if tokens.raw(index) in wanted]
    return tuple(dict.fromkeys(found))
