"""Role safety: text of a client never becomes a special token.

A chat template writes special tokens such as `<|im_end|>` between messages. Where a client's text spells one of them,
the spelling is replaced by a placeholder before the template is rendered; after rendering, the text is cut at the
placeholders, and the spellings are tokenised as plain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

Parts = list[tuple[str, bool]]  # (text, whether it is the spelling of a special token that a client wrote)


class Placeholders:
    """The spellings of special tokens that were found in one conversation."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._pattern = _pattern(tuple(sorted(set(special_tokens), key=lambda token: (-len(token), token))))
        self._found: list[str] = []
        self._mark = secrets.token_hex(8)  # a client cannot guess it

    def protect(self, value: Any) -> Any:
        """The same value (text, list or mapping) with placeholders in its texts."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            return self._pattern.sub(self._replace, value)
        if isinstance(value, Mapping):
            return {self.protect(key): self.protect(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect(item) for item in value]
        return value

    def parts(self, text: str) -> Parts:
        """The rendered text, cut at the placeholders."""
        if not self._found:
            return [(text, False)]
        pieces = re.split(f"\ue000{self._mark}-([0-9]+)\ue001", text)
        numbered = ((self._found[int(piece)], True) if odd % 2 else (piece, False) for odd, piece in enumerate(pieces))
        return [(piece, literal) for piece, literal in numbered if piece]

    def _replace(self, match: re.Match[str]) -> str:
        self._found.append(match.group())
        return f"\ue000{self._mark}-{len(self._found) - 1}\ue001"


@lru_cache(maxsize=8)
def _pattern(tokens: tuple[str, ...]) -> re.Pattern[str] | None:
    spelled = [re.escape(token) for token in tokens if token]
    return re.compile("|".join(spelled)) if spelled else None
