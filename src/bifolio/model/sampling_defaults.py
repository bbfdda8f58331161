"""Sampling defaults of a model: those of its files, else filtered ones that suit its size.

Temperature 1 without filters lets a small model wander off after a few tokens. So a model whose files recommend nothing
gets the filters of llama.cpp, and a low temperature below a billion parameters. `bifolio chat`, `generate`, `run`, the
server's chat endpoint and `LLM.generate` without parameters start from these values. `SamplingParams()` and the
completions endpoint keep their published defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SMALL_MODEL = 1_000_000_000  # parameters
LARGE_DEFAULTS: Mapping[str, float] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
SMALL_DEFAULTS: Mapping[str, float] = {"temperature": 0.2, "top_k": 40, "top_p": 0.9, "min_p": 0.05}
_DECIDES = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p")


def sampling_defaults(generation_config: Mapping[str, Any], num_parameters: int) -> dict[str, Any]:
    """The generation configuration of a model, with filters where it says nothing about drawing tokens."""
    if any(generation_config.get(name) is not None for name in _DECIDES):
        return dict(generation_config)
    filters = SMALL_DEFAULTS if num_parameters < SMALL_MODEL else LARGE_DEFAULTS
    return {**generation_config, **filters}


def help_text(name: str) -> str:
    """The default of an option in words, for `--help`."""
    large, small = LARGE_DEFAULTS[name], SMALL_DEFAULTS[name]
    if large == small:
        return f"default: the model's own, else {large:g}"
    return f"default: the model's own, else {large:g}, below 1B parameters {small:g}"
