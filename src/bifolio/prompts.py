"""Prompts in the forms that vLLM's `inputs` module names; plain text and lists of token ids work as well."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    prompt: str
    suffix: NotRequired[str]  # beyond vLLM: the text after the gap that the model fills in


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
