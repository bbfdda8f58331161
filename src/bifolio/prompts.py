"""Prompts in the forms that vLLM's `inputs` module names; plain text and lists of token ids work as well."""

from __future__ import annotations

from typing import TypedDict


class TextPrompt(TypedDict):
    prompt: str


class TokensPrompt(TypedDict):
    prompt_token_ids: list[int]
