"""`tokenizer.model`: the SentencePiece vocabulary of folders that have no `tokenizer.json`.

The file is a protocol buffer: pieces with scores and types, then the settings of training and normalisation. It is
described by the entries that a GGUF file has for such a vocabulary, and the tokenizer is built from those.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.errors import ModelFileError, UnsupportedModelError
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.file_tokenizer import TokenType
from bifolio.model.gguf.reader import Value
from bifolio.model.gguf.tokenizer import tokenizer_from_metadata
from bifolio.text.tokenizer import Tokenizer

MAX_BYTES = 64 << 20
MAX_TOKENS = 1 << 21
UNIGRAM, BPE = 1, 2  # kinds of models
VARINT, EIGHT_BYTES, MESSAGE, FOUR_BYTES = 0, 1, 2, 5  # forms of fields
_PREFIX = "tokenizer.ggml."


def read_tokenizer(path: Path, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a file; `config` is tokenizer_config.json."""
    if path.stat().st_size > MAX_BYTES:
        raise ModelFileError(f"{path} has {path.stat().st_size} bytes, more than the {MAX_BYTES} allowed")
    try:
        entries = _entries(path, path.read_bytes(), config)
    except UnsupportedModelError:
        raise
    except (LookupError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise ModelFileError(f"{path} is not a usable SentencePiece model: {error}") from error
    return tokenizer_from_metadata(Metadata(entries, path))


def _entries(path: Path, data: bytes, config: Mapping[str, Any]) -> dict[str, Value]:
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    training: dict[int, Any] = {}
    normaliser: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            tokens.append(bytes(piece.get(1, b"")).decode())
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            types.append(int(piece.get(3, TokenType.NORMAL)))
        elif number == 2:
            training = dict(_fields(value))
        elif number == 3:
            normaliser = dict(_fields(value))
    if not tokens:
        raise ValueError("it has no pieces")
    _add_tokens(config, tokens, scores, types)
    kind, charsmap = training.get(3, UNIGRAM), bytes(normaliser.get(2, b""))
    strips = bool(normaliser.get(4, True))
    if kind not in (UNIGRAM, BPE):
        raise UnsupportedModelError(f"{path}: SentencePiece models of words or characters are not supported")
    if kind == BPE and (charsmap or strips):
        raise UnsupportedModelError(f"{path}: a SentencePiece BPE model that normalises text is not supported")
    entries: dict[str, Value] = {
        "general.architecture": "sentencepiece",
        _PREFIX + "model": "llama" if kind == BPE else "t5",
        _PREFIX + "tokens": tokens,
        _PREFIX + "scores": np.array(scores, np.float32),
        _PREFIX + "token_type": np.array(types, np.int32),
        _PREFIX + "unknown_token_id": int(training.get(40, 0)),
        _PREFIX + "add_space_prefix": bool(config.get("add_prefix_space", normaliser.get(3, True))),
        _PREFIX + "remove_extra_whitespaces": strips,
        _PREFIX + "add_bos_token": bool(config.get("add_bos_token", kind == BPE)),
        _PREFIX + "add_eos_token": bool(config.get("add_eos_token", kind == UNIGRAM)),
    }
    if charsmap:
        entries[_PREFIX + "precompiled_charsmap"] = np.frombuffer(charsmap, np.uint8)
    for name, own in (("bos", training.get(41, 1)), ("eos", training.get(42, 2))):
        token_id = _special_id(config, name, tokens)
        entries[f"{_PREFIX}{name}_token_id"] = int(own) if token_id is None else token_id
    return entries


def _special_id(config: Mapping[str, Any], name: str, tokens: list[str]) -> int | None:
    """The id of the token that tokenizer_config.json names."""
    value = config.get(f"{name}_token")
    text = value.get("content") if isinstance(value, Mapping) else value
    return tokens.index(text) if text in tokens else None


def _add_tokens(config: Mapping[str, Any], tokens: list[str], scores: list[float], types: list[int]) -> None:
    """Tokens that tokenizer_config.json adds to the pieces or renames."""
    for key, added in (config.get("added_tokens_decoder") or {}).items():
        token_id = int(key)
        if not 0 <= token_id < MAX_TOKENS:
            raise ValueError(f"tokenizer_config.json adds a token with the id {key}")
        for missing in range(len(tokens), token_id + 1):
            tokens.append(f"[UNUSED_{missing}]")
            scores.append(0.0)
            types.append(TokenType.UNUSED)
        tokens[token_id] = str(added["content"])
        types[token_id] = TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED


def _fields(data: bytes | memoryview) -> Iterator[tuple[int, Any]]:
    """(number, value) of the fields of a message: an integer or the bytes of the value."""
    data, place = memoryview(data), 0
    while place < len(data):
        key, place = _varint(data, place)
        number, form = key >> 3, key & 7
        if form == VARINT:
            value, place = _varint(data, place)
            yield number, value
            continue
        if form == MESSAGE:
            size, place = _varint(data, place)
        elif form in (EIGHT_BYTES, FOUR_BYTES):
            size = 8 if form == EIGHT_BYTES else 4
        else:
            raise ValueError(f"a field has the unknown form {form}")
        if place + size > len(data):
            raise ValueError("it ends in the middle of a field")
        yield number, data[place : place + size]
        place += size


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """(value, place behind it) of an integer of seven bits a byte."""
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("an integer is longer than ten bytes")
