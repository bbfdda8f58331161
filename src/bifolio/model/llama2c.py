"""llama2.c files: a header of seven integers, then every weight as float32, grouped by kind over all layers.

    |dim|hidden|layers|heads|kv heads|vocabulary|context|  (int32; a negative vocabulary: the head has its own weights)
    token embedding, attention norms, wq, wk, wv, wo, MLP norms, w1, w2, w3, final norm, two tables of rope
    (not read: the angles are computed), head if it is not tied

The tokenizer is a file beside the model: `NAME.tokenizer.bin`, or `tokenizer.bin` in the same folder. It holds the
length of the longest token (int32), then for every token its score (float32), its length (int32) and its bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import ConfigError, ModelFileError
from bifolio.model.file_access import map_file
from bifolio.model.gguf.file_tokenizer import TokenType, Vocabulary
from bifolio.model.gguf.tokenizer import sentencepiece_tokenizer
from bifolio.model.loaded import LoadedModel, TextModel
from bifolio.model.model_file import ModelFile
from bifolio.model.tensor_names import GGUF_LLAMA
from bifolio.quant.formats import Bytes, QuantFormat
from bifolio.quant.tensor import QuantizedTensor
from bifolio.text.tokenizer import Tokenizer

_HEADER = struct.Struct("<7i")
_LARGEST = 1 << 31
_MAX_TOKEN_BYTES = 1 << 16
UNKNOWN, BOS, EOS = 0, 1, 2  # fixed ids; the bytes follow as 3 to 258
_FIRST_BYTE = 3


class _Place(NamedTuple):
    """Consecutive tensors of one kind, one per layer."""

    start: int  # in bytes from the start of the file
    shape: tuple[int, ...]  # of each


@dataclass(frozen=True, slots=True)
class Llama2cTensors:
    """The tensors of a file, by their GGUF names."""

    path: Path
    data: Bytes
    places: dict[str, _Place]

    def has(self, name: str) -> bool:
        return name in self.places

    def view(self, name: str, shape: tuple[int, ...]) -> QuantizedTensor:
        kind, layer = _split_name(name)
        place = self.places[kind]
        if place.shape != shape:
            raise ModelFileError(f"{self.path}: {name!r} has shape {place.shape} instead of {shape}")
        size = QuantFormat.F32.bytes_for(shape)
        start = place.start + layer * size
        rows = self.data[start : start + size].reshape(-1, 4 * shape[-1])
        return QuantizedTensor(QuantFormat.F32, rows, shape, name)


def load_llama2c(path: str | Path) -> LoadedModel:
    """Load the model of a llama2.c file."""
    return open_llama2c(path).load()


def open_llama2c(path: str | Path) -> ModelFile:
    """Check the header against the file's size and map the weights."""
    path = Path(path)
    data = map_file(path)
    config = _read_config(path, data)
    places = _layout(path, config, int(data.size))
    tokenizer_path = find_tokenizer(path)
    text = TextModel(
        path=path,
        config=config,
        tokenizer_source=(lambda: read_tokenizer(tokenizer_path, config.vocab_size)) if tokenizer_path else None,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    )
    return ModelFile(text, GGUF_LLAMA, Llama2cTensors(path, data, places))


def find_tokenizer(path: Path) -> Path | None:
    """Path of the tokenizer beside a model file, or None."""
    for candidate in (path.with_suffix(".tokenizer.bin"), path.with_name("tokenizer.bin")):
        if candidate.is_file():
            return candidate
    return None


def _read_config(path: Path, data: Bytes) -> ModelConfig:
    if data.size < _HEADER.size:
        raise ModelFileError(f"{path}: {data.size} bytes are too few for a llama2.c file: fetch it again")
    dim, hidden, layers, heads, kv_heads, vocabulary, context = _HEADER.unpack(data[: _HEADER.size].tobytes())
    tied, vocabulary = vocabulary > 0, abs(vocabulary)
    numbers = (dim, hidden, layers, heads, kv_heads, vocabulary, context)
    if any(not 0 < number < _LARGEST for number in numbers) or dim % heads:
        names = ("width", "MLP width", "layers", "heads", "KV heads", "vocabulary", "context")
        wrong = [(name, number) for name, number in zip(names, numbers, strict=True) if not 0 < number < _LARGEST]
        name, number = wrong[0] if wrong else (f"a width of {dim} for heads", heads)
        raise ModelFileError(
            f"{path} is no llama2.c model: its header has {name} = {number}: pass a .bin file of llama2.c, a .gguf "
            "file or a model folder"
        )
    # Reject impossible numbers of layers before allocating anything per layer.
    if layers * dim * 4 > data.size:
        raise ModelFileError(f"{path}: {layers} layers of {dim} values do not fit into {data.size} bytes")
    try:
        return ModelConfig(
            architecture="llama",
            vocab_size=vocabulary,
            hidden_size=dim,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim // heads,
            intermediate_size=hidden,
            max_position=context,
            norm_eps=1e-5,
            tie_embeddings=tied,
            ropes=(RopeConfig(10000.0, dim // heads),),
            rope_interleaved=True,
            bos_token_id=BOS,
            eos_token_ids=(BOS, EOS) if vocabulary > EOS else (),
        )
    except ConfigError as error:
        raise ModelFileError(f"{path}: {error}") from error


def _layout(path: Path, config: ModelConfig, file_size: int) -> dict[str, _Place]:
    """The position of each kind of tensor, by its GGUF name."""
    d, ffn, kv, vocabulary = config.hidden_size, config.intermediate_size, config.kv_size, config.vocab_size
    rope_bytes = 2 * config.max_position * (config.head_dim // 2) * 4
    order: list[tuple[str, tuple[int, ...], int]] = [
        ("token_embd", (vocabulary, d), 1),
        ("attn_norm", (d,), config.num_layers),
        ("attn_q", (d, d), config.num_layers),
        ("attn_k", (kv, d), config.num_layers),
        ("attn_v", (kv, d), config.num_layers),
        ("attn_output", (d, d), config.num_layers),
        ("ffn_norm", (d,), config.num_layers),
        ("ffn_gate", (ffn, d), config.num_layers),
        ("ffn_down", (d, ffn), config.num_layers),
        ("ffn_up", (ffn, d), config.num_layers),
        ("output_norm", (d,), 1),
    ]
    places, position = {}, _HEADER.size
    for name, shape, count in order:
        places[name] = _Place(position, shape)
        position += count * QuantFormat.F32.bytes_for(shape)
    if not config.tie_embeddings:
        position += rope_bytes
        places["output"] = _Place(position, (vocabulary, d))
        position += QuantFormat.F32.bytes_for((vocabulary, d))
    # With a tied head the rope tables are last and may be missing.
    if not position <= file_size <= position + rope_bytes:
        raise ModelFileError(f"{path}: the sizes in its header need {position} bytes but the file has {file_size}")
    return places


def _split_name(name: str) -> tuple[str, int]:
    """ "blk.3.attn_q.weight" -> ("attn_q", 3)."""
    parts = name.removesuffix(".weight").split(".")
    return (parts[2], int(parts[1])) if parts[0] == "blk" else (parts[0], 0)


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """Read SentencePiece tokens and scores; spaces are plain spaces, and begin-of-text precedes every prompt."""
    data = map_file(path)
    position, buffer, size = 4, data.data, int(data.size)
    if vocab_size * 8 + 4 > size:
        raise ModelFileError(f"{path}: {size} bytes cannot hold {vocab_size} tokens")
    tokens, scores = [], np.empty(vocab_size, np.float32)
    entry = struct.Struct("<fi")
    for index in range(vocab_size):
        if position + 8 > size:
            raise ModelFileError(f"{path}: the file ends before token {index} of {vocab_size}")
        scores[index], length = entry.unpack_from(buffer, position)
        position += 8
        if not 0 <= length <= min(_MAX_TOKEN_BYTES, size - position):
            raise ModelFileError(f"{path}: token {index} has {length} bytes")
        tokens.append(bytes(buffer[position : position + length]))
        position += length
    return sentencepiece_tokenizer(_vocabulary(tokens, scores), bos=BOS)


def _vocabulary(raw: list[bytes], scores: np.ndarray) -> Vocabulary:
    types = np.full(len(raw), TokenType.NORMAL, np.int32)
    names = {UNKNOWN: "<unk>", BOS: "<s>", EOS: "</s>"}
    tokens: list[str] = []
    seen: set[str] = set()
    for index, spelling in enumerate(raw):
        token = names.get(index) or spelling.decode(errors="replace").replace(" ", "▁")
        if _FIRST_BYTE <= index < _FIRST_BYTE + 256:
            token = f"<0x{index - _FIRST_BYTE:02X}>"
            types[index] = TokenType.BYTE
        if not token or token in seen:
            token = f"[REPEATED_{index}]"
        seen.add(token)
        tokens.append(token)
    types[UNKNOWN] = TokenType.UNKNOWN
    types[[index for index in (BOS, EOS) if index < len(raw)]] = TokenType.CONTROL
    return Vocabulary(tokens, types, scores)
