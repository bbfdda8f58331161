"""JSON files of a model's folder, of bounded size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bifolio.errors import ModelFileError

MAX_JSON_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} must hold a JSON object")
    return value


def read_json_value(path: Path) -> Any:
    """Read any JSON value."""
    if not path.is_file():
        raise ModelFileError(f"{path} is missing: a model folder needs config.json and *.safetensors files")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelFileError(f"{path} has {path.stat().st_size} bytes, more than the {MAX_JSON_BYTES} allowed")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not valid JSON: {error}") from error
