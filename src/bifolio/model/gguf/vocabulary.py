"""A tokenizer → the metadata of a GGUF file, the reverse of `gguf_tokenizer`.

The writer rebuilds the tokenizer from the metadata and compares it with the original on probe texts; if they differ,
the complete `tokenizer.json` is stored in the file as well.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.errors import BifolioError
from bifolio.model.gguf.end_tokens import END_NAMES
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.file_tokenizer import TokenType
from bifolio.model.gguf.pretokenizers import PRE_TOKENIZERS
from bifolio.model.gguf.reader import Value
from bifolio.model.gguf.tokenizer import (
    SPACE,
    SPECIAL_NAMES,
    TOKENIZER_JSON,
    byte_level_pre_tokenizer,
    tokenizer_from_metadata,
)
from bifolio.model.gguf.word_pieces import INSIDE, LOWERCASE, stored_piece
from bifolio.model.world_tokens import world_entries
from bifolio.text.longest_match import LongestMatchTokenizer
from bifolio.text.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
# Placeholder for an empty merge list, which cannot be written but is required by other programs; it never matches.
_NO_MERGE = "\u0100 \u0100"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
PROBES = (
    "Hello, world! It's we'LL they'Ve 12345 1,000,000.5 and x=3**2;",
    "  two  spaces,\ttab\n\nlines \r\n   end   ",
    "naïve café cafe\u0301 Ångström ﬁne ½ ² x²",
    "你好，世界。こんにちは 한국어 привет γειά שלום مرحبا हिन्दी ไทย",
    "🚀👩‍👩‍👧 ❤️ \u200b zero width, ▁ meta, _under_ score",
    'def f(x):\n    return {"a": [1, 2], "b": None}  # !@#$%^&*()\n\n\n',
    "",
    " ",
    "<s> [INST] <|im_start|>user\nhi<|im_end|>",
)


def tokenizer_metadata(
    tokenizer: Tokenizer, config: ModelConfig, special_tokens: Mapping[str, str]
) -> tuple[dict[str, Value], list[str]]:
    """The entries, and notes on properties of the tokenizer that they cannot describe."""
    entries: dict[str, Value]
    if isinstance(tokenizer, LongestMatchTokenizer):
        entries = world_entries(tokenizer, config.vocab_size)
        return entries | _special_entries(tokenizer, config, special_tokens), []
    backend = tokenizer.backend
    description = json.loads(backend.to_str())
    entries = {}
    notes: list[str] = []
    kind = _kind(description)
    if kind is not None:
        entries = _vocabulary_entries(kind, description, backend, config.vocab_size)
        entries |= _special_entries(tokenizer, config, special_tokens)
    if kind is None or not _rebuilds(entries, tokenizer, config):
        entries.setdefault(_PREFIX + "model", "no_vocab")
        entries[TOKENIZER_JSON] = backend.to_str()
        notes.append(
            "GGUF metadata cannot describe this tokenizer completely, so its tokenizer.json is stored in the file: "
            "bifolio reads it, other programs may tokenize some texts differently"
        )
    return entries, notes


def _kind(description: Mapping[str, Any]) -> str | None:
    """The kind of GGUF tokenizer it corresponds to, if any."""
    model = description["model"]
    if model["type"] == "Unigram":
        return "t5"
    if model["type"] == "WordPiece":
        return "bert" if model.get("continuing_subword_prefix", INSIDE) == INSIDE else None
    if model["type"] != "BPE":
        return None
    if model.get("byte_fallback"):
        return "llama"
    return "gpt2" if "ByteLevel" in json.dumps(description.get("pre_tokenizer")) else None


def _vocabulary_entries(kind: str, description: Mapping[str, Any], backend: Any, vocab_size: int) -> dict[str, Value]:
    tokens, types = _tokens_and_types(kind, description, backend, vocab_size)
    entries: dict[str, Value] = {
        _PREFIX + "model": kind,
        _PREFIX + "tokens": tokens,
        _PREFIX + "token_type": np.array(types, np.int32),
    }
    model = description["model"]
    if kind == "bert":
        entries[_PREFIX + "tokens"] = [stored_piece(token, type) for token, type in zip(tokens, types, strict=True)]
        normalizer = description.get("normalizer") or {}
        names = {"unknown": model.get("unk_token"), "padding": "[PAD]", "mask": "[MASK]"}
        ids = {name: backend.token_to_id(token) for name, token in names.items() if token is not None}
        entries |= {f"{_PREFIX}{name}_token_id": number for name, number in ids.items() if number is not None}
        return {**entries, LOWERCASE: bool(normalizer.get("lowercase", False))}
    if kind == "gpt2":
        merges = [_pair(merge) for merge in model["merges"]]
        entries[_PREFIX + "pre"] = _pre_name(backend, bool(model.get("ignore_merges")))
        entries[_PREFIX + "merges"] = [f"{left} {right}" for left, right in merges] or [_NO_MERGE]
        return entries
    entries[_PREFIX + "pre"] = "default"
    entries[_PREFIX + "add_space_prefix"] = _starts_with_space(backend)
    if kind == "llama":
        entries[_PREFIX + "scores"] = _scores_from_merges(tokens, [_pair(merge) for merge in model["merges"]])
    else:
        entries |= _unigram_entries(description, len(tokens))
    return entries


def _tokens_and_types(
    kind: str, description: Mapping[str, Any], backend: Any, vocab_size: int
) -> tuple[list[str], list[int]]:
    """Tokens by id; embedding rows without a token get placeholder tokens of type unused."""
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [int(TokenType.UNUSED)] * vocab_size
    for token, index in backend.get_vocab(with_added_tokens=True).items():
        if index < vocab_size:
            is_byte = kind not in ("gpt2", "bert") and _BYTE_TOKEN.fullmatch(token)
            tokens[index] = token
            types[index] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for added in description.get("added_tokens", ()):
        if added["id"] < vocab_size:
            types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    unknown = description["model"].get("unk_token")
    unknown_id = description["model"].get("unk_id") if unknown is None else backend.token_to_id(unknown)
    if kind != "gpt2" and unknown_id is not None and unknown_id < vocab_size:
        types[unknown_id] = TokenType.UNKNOWN
    return tokens, types


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
    return left, right


def _scores_from_merges(tokens: list[str], merges: list[tuple[str, str]]) -> np.ndarray:
    """Scores from the merge order: earlier merges get better scores; tokens without a merge keep the default."""
    rank: dict[str, int] = {}
    for index, (left, right) in enumerate(merges):
        rank.setdefault(left + right, index)
    return np.array([float(-rank.get(token, 0)) for token in tokens], np.float32)


def _unigram_entries(description: Mapping[str, Any], num_tokens: int) -> dict[str, Value]:
    scores = np.zeros(num_tokens, np.float32)
    values = [score for _, score in description["model"]["vocab"]][:num_tokens]
    scores[: len(values)] = values
    entries: dict[str, Value] = {_PREFIX + "scores": scores}
    match = re.search(r'"precompiled_charsmap": ?"([^"]+)"', json.dumps(description.get("normalizer")))
    if match:
        charsmap = np.frombuffer(base64.b64decode(match.group(1)), np.uint8)
        entries[_PREFIX + "precompiled_charsmap"] = charsmap
    return entries


def _pre_name(backend: Any, ignore_merges: bool) -> str:
    """The name of the pre-tokenizer that splits the probe texts identically."""
    expected = [_pieces(backend.pre_tokenizer, text) for text in PROBES]
    for name, known in PRE_TOKENIZERS.items():
        if known.ignore_merges != ignore_merges:
            continue
        candidate = byte_level_pre_tokenizer(name)
        if [_pieces(candidate, text) for text in PROBES] == expected:
            return name
    return "default"


def _pieces(pre_tokenizer: Any, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def _starts_with_space(backend: Any) -> bool:
    tokens = backend.encode("a", add_special_tokens=False).tokens
    return bool(tokens) and tokens[0].startswith(SPACE)


def _special_entries(tokenizer: Tokenizer, config: ModelConfig, special_tokens: Mapping[str, str]) -> dict[str, Value]:
    ids = {name: tokenizer.token_id(text) for name, text in special_tokens.items()}
    ids["bos_token"] = ids.get("bos_token") if config.bos_token_id is None else config.bos_token_id
    ids |= {f"{name}_token": token_id for name, token_id in zip(END_NAMES, config.eos_token_ids, strict=False)}
    entries: dict[str, Value] = {
        f"{_PREFIX}{key}_token_id": token_id
        for name, key in {**SPECIAL_NAMES, **{end: end for end in END_NAMES}}.items()
        if (token_id := ids.get(f"{name}_token")) is not None and token_id < config.vocab_size
    }
    plain, framed = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    if config.bidirectional and len(framed) == len(plain) + 2:
        ends = {"cls": framed[0], "seperator": framed[-1]}
        entries |= {f"{_PREFIX}{name}_token_id": token_id for name, token_id in ends.items()}
    if config.bidirectional and config.token_types:
        entries[_PREFIX + "token_type_count"] = config.token_types  # llama.cpp opens no bert without it
    entries[_PREFIX + "add_bos_token"] = len(framed) > len(plain) and framed[0] != plain[0]
    entries[_PREFIX + "add_eos_token"] = len(framed) > len(plain) and framed[-1] != plain[-1]
    return entries


def _rebuilds(entries: Mapping[str, Value], tokenizer: Tokenizer, config: ModelConfig) -> bool:
    """Whether the tokenizer rebuilt from these entries encodes and decodes the probe texts identically."""
    described = {"general.architecture": config.architecture, **entries}
    described[f"{config.architecture}.attention.causal"] = not config.bidirectional
    try:
        rebuilt = tokenizer_from_metadata(Metadata(described, Path("the new file")))
    except BifolioError:
        return False
    if config.bidirectional and _pairs(rebuilt) != _pairs(tokenizer):
        return False
    return all(
        rebuilt.encode(text) == (ids := tokenizer.encode(text))
        and (config.bidirectional or rebuilt.decode(ids) == tokenizer.decode(ids))
        for text in PROBES
    )


def _pairs(tokenizer: Tokenizer) -> list[tuple[list[int], list[int]]]:
    """Tokens of pairs of texts, and the text that each belongs to."""
    pairs = list(itertools.pairwise(PROBES))
    return [(encoding.ids, encoding.type_ids) for encoding in tokenizer.encodings(pairs, True)]
