"""Sampling defaults: `general.sampling.*` of a GGUF file ↔ the names of `generation_config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bifolio.model.gguf.reader import Value

_PREFIX = "general.sampling."
_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_WHOLE = {"top_k"}


def sampling_entries(generation_config: Mapping[str, Any]) -> dict[str, Value]:
    """Convert generation defaults to metadata; settings without a GGUF name are left out."""
    entries: dict[str, Value] = {}
    for key, name in _NAMES.items():
        value: Any = generation_config.get(name)
        if _is_number(value):
            entries[_PREFIX + key] = int(value) if key in _WHOLE else float(value)
    if generation_config.get("do_sample") is False:
        entries[_PREFIX + "temp"] = 0.0
    return entries


def generation_config_from(metadata: Mapping[str, Value]) -> dict[str, Any]:
    """Read defaults for `SamplingParams`; entries that are not numbers are left out."""
    found: dict[str, Any] = {}
    for key, name in _NAMES.items():
        value: Any = metadata.get(_PREFIX + key)
        if _is_number(value):
            # Values are stored in f32: round 0.800000011920929 back to 0.8.
            found[name] = int(value) if key in _WHOLE else round(float(value), 6)
    if "temperature" in found:  # transformers samples only if do_sample is set
        found["do_sample"] = found["temperature"] > 0
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
