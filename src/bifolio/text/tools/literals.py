"""Literals of other languages as JSON, piece by piece."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from bifolio.text.strict_json import write_json

MAX_DEPTH = 64  # brackets inside each other
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?\d[\d.eE+\-]*")


def literal_to_json(text: str, piece: re.Pattern[str], rewrite: Callable[[str, str, list[str]], str]) -> str | None:
    """A literal as JSON; None if it is none.

    `piece` matches one piece, in time linear in the piece: a group `word` for constants and numbers, other groups for
    pieces that are rewritten, no group for spaces. `rewrite` gets the name of the group, its text and the pieces so
    far, which it may change.
    """
    pieces: list[str] = []
    at = 0
    while at < len(text):
        found = piece.match(text, at)
        if found is None:
            return None
        at = found.end()
        kind = found.lastgroup
        if kind == "word":
            word = found["word"].rstrip()
            if word not in _WORDS and not _NUMBER.fullmatch(word):
                return None
            pieces.append(_WORDS.get(word, word))
        elif kind is not None:
            pieces.append(rewrite(kind, found[kind], pieces))
    try:
        return write_json(json.loads("".join(pieces)))
    except (ValueError, RecursionError):
        return None
