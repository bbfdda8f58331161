"""Bounds on a tokenizer.json: pipelines that make long texts of short ones are refused before they are loaded.

Real pipelines replace a character or two, have a handful of steps, and add a few special tokens around a text.
"""

from __future__ import annotations

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
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        _check_pipeline(path, part, raw.get(part))
    processor = raw.get("post_processor")
    if processor is not None and sum(1 for _ in _objects(path, processor)) > 4 * MAX_TEMPLATE_ENTRIES:
        raise ModelFileError(f"{path}: the post_processor has more than {MAX_TEMPLATE_ENTRIES} entries")


def _check_pipeline(path: Path, name: str, part: Any) -> None:
    growth, steps = 1.0, 0
    for step in _objects(path, part):
        steps += "type" in step
        texts = [value for value in step.values() if isinstance(value, str)]
        pattern = step.get("pattern")
        if isinstance(pattern, dict):
            texts += [value for value in pattern.values() if isinstance(value, str)]
        if any(len(text) > MAX_TEXT_CHARS for text in texts):
            raise ModelFileError(f"{path}: a text of the {name} has more than {MAX_TEXT_CHARS} characters")
        if step.get("type") in ("Replace", "Prepend"):
            growth *= max(1.0, float(len(str(step.get("content") or step.get("prepend") or ""))))
    if steps > MAX_STEPS:
        raise ModelFileError(f"{path}: the {name} has {steps} steps, more than any real tokenizer")
    if growth > MAX_GROWTH:
        raise ModelFileError(f"{path}: the replacements of the {name} make a text {growth:g} times as long")


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
