"""Everything about a model but its weights: enough to turn text into tokens and back, and to plan memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import RequestError
from bifolio.model.sampling_defaults import sampling_defaults
from bifolio.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextModel:
    """The configuration of a model and its text: vocabulary, chat template, defaults. Opening one reads no weights."""

    path: Path
    config: ModelConfig
    tokenizer_source: Callable[[], Tokenizer] | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)  # names as chat templates use them: bos_token, ...

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, built when first used; None where the files hold none."""
        return None if self.tokenizer_source is None else self.tokenizer_source()

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """Values of `generation_config.json` for requests that set none: the model's own, else filtered ones."""
        return sampling_defaults(self.generation_config, self.config.num_parameters)

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{self.path} has no tokenizer: pass prompts as lists of token ids")
        return self.tokenizer
