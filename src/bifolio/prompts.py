"""Prompts in the forms that vLLM's `inputs` module names; plain text and lists of token ids work as well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

from bifolio.images import PromptImage


class TextPrompt(TypedDict):
    prompt: str
    multi_modal_data: NotRequired[dict[str, Any]]  # {"image": image} or {"image": [image, ...]}
    suffix: NotRequired[str]  # beyond vLLM: the text after the gap that the model fills in


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
    multi_modal_data: NotRequired[dict[str, Any]]


class PromptTokens(NamedTuple):
    """A prompt as the engine takes it."""

    text: str | None  # if it was given
    token_ids: Sequence[int]
    images: tuple[PromptImage, ...] = ()
