"""The vocabulary of RWKV World in files: lines of a text file in folders, escaped bytes in GGUF files."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.errors import ModelFileError
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.file_tokenizer import SPECIAL, TokenType
from bifolio.text.longest_match import LongestMatchTokenizer

WORLD = "rwkv"  # `tokenizer.ggml.model`
VOCABULARY_FILE = "rwkv_vocab_v20230424.txt"
MAX_BYTES, MAX_LINE, MAX_TOKENS = 64 << 20, 1 << 13, 1 << 22
END_ID, END = 0, "<|rwkv_tokenizer_end_of_text|>"  # the end of a text, which is no line of the file
_ESCAPES = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
_ESCAPED = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)


def unescaped(text: str) -> bytes:
    r"""The bytes of a token of a GGUF file, such as `\xff`."""

    def byte(match: re.Match[bytes]) -> bytes:
        found = match[1]
        return bytes([int(found[1:], 16)]) if len(found) == 3 else _ESCAPES.get(found, found)

    return _ESCAPED.sub(byte, text.encode())


def escaped(piece: bytes) -> str:
    return repr(piece)[2:-1]


def world_from_gguf(metadata: Metadata, tokens: list[str], types: np.ndarray) -> LongestMatchTokenizer:
    """The tokenizer of a file with these tokens and types."""
    pieces, special = {}, {}
    for number, (token, kind) in enumerate(zip(tokens, types.tolist(), strict=True)):
        if kind in SPECIAL:
            special[number] = token
        elif kind != TokenType.UNUSED and token:
            pieces[number] = unescaped(token)
    try:
        return LongestMatchTokenizer(pieces, special, len(tokens))
    except ModelFileError as error:
        raise metadata.fail(str(error)) from error


def world_entries(tokenizer: LongestMatchTokenizer, vocab_size: int) -> dict[str, Any]:
    """The vocabulary as metadata of a GGUF file."""
    tokens = [f"[PAD{number}]" for number in range(vocab_size)]
    types = np.full(vocab_size, TokenType.UNUSED, np.int32)
    for spellings, kind in (
        ({number: escaped(piece) for number, piece in tokenizer.pieces.items()}, TokenType.NORMAL),
        (tokenizer.special, TokenType.CONTROL),
    ):
        for number, spelling in spellings.items():
            if number < vocab_size:
                tokens[number], types[number] = spelling, kind
    prefix = "tokenizer.ggml."
    return {f"{prefix}model": WORLD, f"{prefix}tokens": tokens, f"{prefix}token_type": types}


def read_world(path: Path, settings: Mapping[str, Any]) -> LongestMatchTokenizer:
    """The tokenizer of a folder; `settings` is tokenizer_config.json. Lines are `17 'text' 4` or `17 b'bytes' 5`."""
    if path.stat().st_size > MAX_BYTES:
        raise ModelFileError(f"{path} has {path.stat().st_size} bytes, more than the {MAX_BYTES} allowed")
    pieces: dict[int, bytes] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        if not line.strip():
            continue
        try:
            first, _, rest = line[:MAX_LINE].partition(" ")
            spelling, _, length = rest.rstrip().rpartition(" ")
            value, number = ast.literal_eval(spelling), int(first)
            piece = value.encode() if isinstance(value, str) else value
            is_right = isinstance(piece, bytes) and len(piece) == int(length) and 0 <= number < MAX_TOKENS
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ModelFileError(f"{path}: the line {line[:60]!r} describes no token: {error}") from error
        if not is_right:
            raise ModelFileError(f"{path}: the line {line[:60]!r} describes no token of its length")
        pieces[number] = piece
    special = {} if END_ID in pieces else {END_ID: _end_of(settings)}
    return LongestMatchTokenizer(pieces, special, max(pieces, default=0) + 1)


def _end_of(settings: Mapping[str, Any]) -> str:
    found = settings.get("eos_token")
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) and found else END


def write_world(folder: Path, tokenizer: LongestMatchTokenizer) -> None:
    """The vocabulary in the file of a folder."""
    lines = []
    for number, piece in sorted(tokenizer.pieces.items()):
        try:
            spelling = repr(piece.decode())
        except UnicodeDecodeError:
            spelling = repr(piece)
        lines.append(f"{number} {spelling} {len(piece)}\n")
    (folder / VOCABULARY_FILE).write_text("".join(lines), encoding="utf-8", newline="\n")
