"""Arguments of `LLM` and `AsyncLLM`: prompts and parameters in every form that callers pass."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from bifolio.beam_params import BeamSearchParams
from bifolio.errors import RequestError, did_you_mean
from bifolio.prompts import PromptTokens
from bifolio.sampling_params import SamplingParams

Params = TypeVar("Params", SamplingParams, BeamSearchParams, SamplingParams | BeamSearchParams)
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any] | PromptTokens
PROMPT_KEYS = ("prompt", "prompt_token_ids", "suffix", "multi_modal_data")  # of a prompt that is a mapping
PROGRESS_FROM = 8  # minimum number of prompts for a progress bar


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Normalise one prompt or several (text, token ids or mappings) to a list."""
    if isinstance(prompts, str | Mapping | PromptTokens):
        return [prompts]
    if prompts is None or not hasattr(prompts, "__len__"):
        raise RequestError(f"prompts are text, token ids or a list of them, not {prompts!r}")
    if not len(prompts):
        return []
    if all(isinstance(item, int) or hasattr(item, "__index__") for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def suffix_of(prompt: Prompt) -> str | None:
    """The text after the gap of a prompt that has one. Keys of a mapping that are not known are refused by name."""
    if not isinstance(prompt, Mapping):
        return None
    for name, value in prompt.items():
        if name not in PROMPT_KEYS and value is not None:
            hint = did_you_mean(str(name), PROMPT_KEYS)
            raise RequestError(f"a prompt has no {name!r}{hint or ': it has ' + ', '.join(PROMPT_KEYS)}")
    suffix = prompt.get("suffix")
    if suffix is not None and not isinstance(suffix, str):
        raise RequestError(f"the suffix of a prompt is text, not {suffix!r}")
    return suffix


def ending_at(params: Params, token_ids: Sequence[int]) -> Params:
    """The parameters with further tokens that end the output, unless they ignore the end of the text."""
    if params.ignore_eos:
        return params
    ends = tuple(dict.fromkeys([*params.stop_token_ids, *token_ids]))
    return dataclasses.replace(params, stop_token_ids=ends)


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
