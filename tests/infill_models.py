"""Tiny models whose vocabulary has the tokens of a text with a gap."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from bifolio.text.infill import SPELLINGS, Spelling
from helpers import fresh_folder, tiny_folder, tiny_tokenizer

QWEN, STARCODER, *_ = SPELLINGS
CODESTRAL = next(each for each in SPELLINGS if each.middle is None)


def names_of(spelling: Spelling) -> list[str]:
    marks = (spelling.prefix, spelling.suffix, spelling.middle or "")
    return [name for name in dict.fromkeys((*marks, *spelling.repository, *spelling.file, *spelling.ends)) if name]


def infill_tokenizer(spelling: Spelling) -> Any:
    """The tokenizer of the tests (`tokenizers.Tokenizer`) with these tokens."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer().to_str())
    backend.add_special_tokens([name for name in names_of(spelling) if backend.token_to_id(name) is None])
    return backend


@cache
def infill_folder(spelling: Spelling = QWEN, chat_template: str | None = None) -> Path:
    folder, backend = fresh_folder("infill"), infill_tokenizer(spelling)
    size = {"vocab_size": backend.get_vocab_size(), "bos_token_id": 0, "eos_token_id": 0}
    tiny_folder(folder, chat_template=chat_template, max_position_embeddings=1024, **size)
    backend.save(str(folder / "tokenizer.json"))
    return folder
