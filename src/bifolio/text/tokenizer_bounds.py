"""Bounds on a tokenizer.json: pipelines that make long texts of short ones are refused before they are loaded.

Real pipelines replace a character or two, have a handful of steps, and add a few special tokens around a text.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bifolio.errors import ModelFileError

MAX_FILE_BYTES = 256 << 20
MAX_STEPS = 64  # of a normalizer, pre-tokenizer or decoder
MAX_TEXT_CHARS = 4096  # of a pattern or of its replacement
MAX_GROWTH = 64.0  # times that all replacements together lengthen a text
MAX_TEMPLATE_ENTRIES = 256  # of a post-processor
MAX_TOKEN_ID = 1 << 22  # tables of tokens have an entry for every id below the largest
MAX_COUNT = 1 << 16  # of characters that a step strips, or of which it makes a piece
MAX_DEPTH = 16


def check_tokenizer_file(path: Path) -> None:
    """Raise `ModelFileError` for a file whose pipeline no real tokenizer has."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ModelFileError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, more than any real tokenizer")
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not a usable tokenizer: {error}") from error
    if not isinstance(raw, dict):
        raise ModelFileError(f"{path} is not a usable tokenizer: it is no JSON object")
    _check_ids(path, raw)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        _check_pipeline(path, part, raw.get(part))
    if _num_entries(path, raw.get("post_processor")) > 4 * MAX_TEMPLATE_ENTRIES:
        raise ModelFileError(f"{path}: the post_processor has more than {MAX_TEMPLATE_ENTRIES} entries")


def _check_ids(path: Path, raw: dict[str, Any]) -> None:
    model, added = raw.get("model"), raw.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocab.values()) if isinstance(vocab, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if any(isinstance(token_id, int | float) and not 0 <= token_id < MAX_TOKEN_ID for token_id in ids):
        raise ModelFileError(f"{path}: a token id is not between 0 and {MAX_TOKEN_ID - 1}")


def _check_pipeline(path: Path, name: str, part: Any) -> None:
    growth, steps = 1.0, 0
    for step in _objects(path, part):
        steps += "type" in step
        texts = [value for value in step.values() if isinstance(value, str)]
        pattern = step.get("pattern")
        if isinstance(pattern, dict):
            texts += [value for value in pattern.values() if isinstance(value, str)]
        if any(len(text) > MAX_TEXT_CHARS for text in texts if text is not step.get("precompiled_charsmap")):
            raise ModelFileError(f"{path}: a text of the {name} has more than {MAX_TEXT_CHARS} characters")
        counts = [value for value in step.values() if isinstance(value, int) and not isinstance(value, bool)]
        if any(not 0 <= count <= MAX_COUNT for count in counts):
            raise ModelFileError(f"{path}: a number of the {name} is not between 0 and {MAX_COUNT}")
        if step.get("type") == "Precompiled":
            _check_charsmap(path, step.get("precompiled_charsmap"))
        if step.get("type") in ("Replace", "Prepend"):
            growth *= max(1.0, float(len(str(step.get("content") or step.get("prepend") or ""))))
    if steps > MAX_STEPS:
        raise ModelFileError(f"{path}: the {name} has {steps} steps, more than any real tokenizer")
    if growth > MAX_GROWTH:
        raise ModelFileError(f"{path}: the replacements of the {name} make a text {growth:g} times as long")


def _check_charsmap(path: Path, encoded: Any) -> None:
    """SentencePiece's table: the size of its index, the index, then texts. The library allocates before it checks."""
    try:
        table = base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else b""
    except (binascii.Error, ValueError):
        table = b""
    size = int.from_bytes(table[:4], "little")
    if not 4 <= size <= len(table) - 4 or size % 4:
        raise ModelFileError(f"{path}: the precompiled_charsmap of the normalizer is damaged")


def _num_entries(path: Path, processor: Any) -> int:
    """Objects of a post-processor, and items of their lists, such as the ids of a special token."""
    lists = (item for found in _objects(path, processor) for item in found.values() if isinstance(item, list))
    return sum(1 for _ in _objects(path, processor)) + sum(map(len, lists))


def _objects(path: Path, value: Any) -> Iterator[dict[str, Any]]:
    """Every JSON object inside of a value."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                yield item
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = below
    if level:
        raise ModelFileError(f"{path}: the tokenizer is nested more than {MAX_DEPTH} deep")
