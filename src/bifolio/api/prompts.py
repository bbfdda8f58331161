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


def beam_params(params: Any, num_prompts: int) -> list[BeamSearchParams]:
    """The parameters of the search for each prompt; the defaults where none are given."""
    each = list(params) if isinstance(params, Sequence) else [params or BeamSearchParams()] * num_prompts
    for item in each:
        if not isinstance(item, BeamSearchParams):
            raise RequestError(f"params must be BeamSearchParams, or one for each prompt, not {item!r}")
    if len(each) != num_prompts:
        raise RequestError(f"{num_prompts} prompts and {len(each)} BeamSearchParams: pass one, or one for each")
    return each


def show_progress(wanted: bool | None, num_requests: int) -> bool:
    """Whether to show a progress bar; by default for large calls on a terminal."""
    return sys.stderr.isatty() and num_requests >= PROGRESS_FROM if wanted is None else wanted
