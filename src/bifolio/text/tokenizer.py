"""Text ↔ token ids: a thin wrapper that imports `tokenizers` on first use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bifolio.errors import ModelFileError


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`, whose post-processor adds begin-of-text tokens."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        import tokenizers

        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises plain Exception for every kind of bad file
            raise ModelFileError(f"{path} is not a usable tokenizer: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str:
        """The token's entry in the vocabulary (not always printable text)."""
        text: str | None = self.backend.id_to_token(token_id)
        return f"<{token_id}>" if text is None else text

    def token_id(self, token: str) -> int | None:
        found: int | None = self.backend.token_to_id(token)
        return found
