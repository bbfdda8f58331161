"""Arguments of `LLM` and `AsyncLLM`: prompts and parameters in every form that callers pass."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from bifolio.beam_params import BeamSearchParams
from bifolio.errors import RequestError
from bifolio.sampling_params import SamplingParams

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
PromptTokens: TypeAlias = tuple[str | None, Sequence[int]]  # text, if it was given; token ids
PROGRESS_FROM = 8  # minimum number of prompts for a progress bar


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Normalise one prompt or several (text, token ids or mappings) to a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts is None or not hasattr(prompts, "__len__"):
        raise RequestError(f"prompts are text, token ids or a list of them, not {prompts!r}")
    if not len(prompts):
        return []
    if all(isinstance(item, int) or hasattr(item, "__index__") for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def checked_params(params: Any) -> list[SamplingParams]:
    """A list of parameters; anything else is refused by its name."""
    if isinstance(params, Mapping):
        raise RequestError("sampling_params is a dict: pass SamplingParams(**options)")
    if isinstance(params, BeamSearchParams):
        raise RequestError("BeamSearchParams are for beam_search(): call it, or pass SamplingParams")
    items = list(params) if isinstance(params, Sequence) else [params]
    for item in items:
        if not isinstance(item, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, or one for each prompt, not {item!r}")
    return items


def show_progress(wanted: bool | None, num_requests: int) -> bool:
    """Whether to show a progress bar; by default for large calls on a terminal."""
    return sys.stderr.isatty() and num_requests >= PROGRESS_FROM if wanted is None else wanted
