"""The tokenizer of RWKV World: the longest token at each byte, from folders and from GGUF files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bifolio.config import ModelConfig, RopeConfig
from bifolio.errors import ModelFileError
from bifolio.model.gguf.entries import Metadata
from bifolio.model.gguf.tokenizer import tokenizer_from_metadata
from bifolio.model.gguf.vocabulary import PROBES, tokenizer_metadata
from bifolio.model.world_tokens import END, VOCABULARY_FILE, escaped, read_world, unescaped, write_world
from bifolio.text.longest_match import LongestMatchTokenizer

WORDS = [
    "the",
    " the",
    "ther",
    "there",
    "  ",
    "\n\n",
    "é",
    "你好",
    "é́",
    "wor",
    "world!",
    "orld",
    "a\"'",
    "\\x",
    "\\",
    "ab" * 60,
]
TEXTS = [*PROBES, "there the  world! worl", "ab" * 130, "\\xff \\ \\x41", "a\"'b", "é́e", f"one{END}two"]


def lines() -> list[tuple[int, bytes]]:
    pieces = [bytes([byte]) for byte in range(256)]
    pieces += [word.encode() for word in WORDS if len(word.encode()) > 1]
    pieces += ["你".encode()[:2], "é".encode()[1:] + b"x"]
    return list(enumerate(pieces, start=1))


def write_vocabulary(folder: Path) -> Path:
    """A file as those of RWKV World: texts, and bytes that are no text."""
    path, written = folder / VOCABULARY_FILE, []
    for number, piece in lines():
        try:
            spelling = repr(piece.decode())
        except UnicodeDecodeError:
            spelling = repr(piece)
        written.append(f"{number} {spelling} {len(piece)}\n")
    path.write_text("".join(written), encoding="utf-8")
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> LongestMatchTokenizer:
    return read_world(write_vocabulary(tmp_path), {})


def longest_matches(text: str) -> list[int]:
    """By the definition: of all tokens that begin the rest of the text the longest."""
    found: list[int] = []
    for part in re.split(f"({re.escape(END)})", text):
        rest = b"" if part == END else part.encode()
        found += [0] if part == END else []
        while rest:
            number, piece = max((each for each in lines() if rest.startswith(each[1])), key=lambda each: len(each[1]))
            found.append(number)
            rest = rest[len(piece) :]
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_the_longest_token_is_taken(tokenizer: LongestMatchTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == longest_matches(text)
    assert list(tokenizer.encode_packed(text)) == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == text.replace(END, "")


@pytest.mark.parametrize("text", TEXTS)
def test_the_library_object_is_equal(tokenizer: LongestMatchTokenizer, text: str) -> None:
    """Grammars and other libraries read it."""
    backend = tokenizer.backend
    assert backend.encode(text, add_special_tokens=False).ids == tokenizer.encode(text)
    assert backend.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert backend.id_to_token(270) == tokenizer.token(270)
    assert tokenizer.token_id(tokenizer.token(260)) == 260


def test_text_arrives_in_whole_characters(tokenizer: LongestMatchTokenizer) -> None:
    detokenizer, text = tokenizer.new_detokenizer([], True), "naïve 你好 🚀 é́."
    pieces = [detokenizer.push(number) for number in tokenizer.encode(text)]
    assert "".join(pieces) + detokenizer.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_gguf_file_and_a_folder_keep_the_tokenizer(tokenizer: LongestMatchTokenizer, tmp_path: Path) -> None:
    rows = tokenizer.vocab_size + 5  # more than tokens
    config = ModelConfig("llama", rows, 64, 1, 4, 4, 16, 64, 128, ropes=(RopeConfig(10000.0, 16),))
    entries, notes = tokenizer_metadata(tokenizer, config, {"eos_token": END})
    assert (entries["tokenizer.ggml.model"], notes) == ("rwkv", [])
    assert entries["tokenizer.ggml.eos_token_id"] == 0
    rebuilt = tokenizer_from_metadata(Metadata({"general.architecture": "rwkv7", **entries}, Path("m.gguf")))
    assert [rebuilt.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert isinstance(rebuilt, LongestMatchTokenizer)
    assert rebuilt.pieces == tokenizer.pieces
    (tmp_path / "new").mkdir()
    write_world(tmp_path / "new", rebuilt)
    assert (tmp_path / "new" / VOCABULARY_FILE).read_bytes() == (tmp_path / VOCABULARY_FILE).read_bytes()


@pytest.mark.parametrize("piece", [bytes(range(256)), b"\\", b"\\x41", b"'", b"\"'", "é".encode(), b"\n\r\t\0"])
def test_bytes_are_escaped_as_in_gguf_files(piece: bytes) -> None:
    assert unescaped(escaped(piece)) == piece


DAMAGED: list[tuple[str, str]] = [
    ("300 'a", "describes no token"),
    ("300 'ab' 3", "describes no token of its length"),
    ("-1 'a' 1", "describes no token of its length"),
    ("300 __import__('os') 2", "describes no token"),
    ("300 12 2", "describes no token of its length"),
    ("300 '' 0", "has 0 bytes, not 1 to"),
]


@pytest.mark.parametrize(("line", "message"), DAMAGED)
def test_damaged_vocabularies_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = write_vocabulary(tmp_path)
    path.write_text(path.read_text() + line)
    with pytest.raises(ModelFileError, match=message):
        read_world(path, {})


def test_a_vocabulary_needs_all_bytes() -> None:
    entries: dict[str, Any] = {"general.architecture": "rwkv7", "tokenizer.ggml.model": "rwkv"}
    entries["tokenizer.ggml.tokens"] = ["<s>", "a", "b"]
    entries["tokenizer.ggml.token_type"] = np.array([3, 1, 1], np.int32)
    with pytest.raises(ModelFileError, match="no token of the byte 0"):
        tokenizer_from_metadata(Metadata(entries, Path("m.gguf")))
