"""What every loader returns: a model, ready to be prepared by a kernel set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bifolio.config import ModelConfig
from bifolio.errors import RequestError
from bifolio.model.weights import ModelWeights
from bifolio.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """Weights are memory-mapped; the tokenizer is built when first used."""

    path: Path
    config: ModelConfig
    weights: ModelWeights
    tokenizer_source: Callable[[], Tokenizer] | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)  # names as chat templates use them: bos_token, ...

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return None if self.tokenizer_source is None else self.tokenizer_source()

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{self.path} has no tokenizer: pass prompts as lists of token ids")
        return self.tokenizer
