"""A model without its weights (`TextModel`) and with them (`LoadedModel`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.config import ModelConfig
from bifolio.errors import RequestError
from bifolio.model.sampling_defaults import sampling_defaults
from bifolio.model.weights import ModelWeights
from bifolio.quant.tensor import QuantizedTensor
from bifolio.text.tokenizer import Tokenizer

SAMPLED_BYTES = 4096  # of each matrix, for its digest


@dataclass(frozen=True)
class TextModel:
    """Configuration, tokenizer, chat template and generation defaults: enough to process text and to plan memory.

    Opening a `TextModel` reads no weights.
    """

    path: Path
    config: ModelConfig
    tokenizer_source: Callable[[], Tokenizer] | None = None
    generation_config: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)  # by their names in chat templates: bos_token, ...

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, built on first use; None if the files have none."""
        return None if self.tokenizer_source is None else self.tokenizer_source()

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """Values of `generation_config.json` for requests that set none: the model's own, else filtered ones."""
        return sampling_defaults(self.generation_config, self.config.num_parameters)

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{self.path} has no tokenizer: pass prompts as lists of token ids")
        return self.tokenizer


@dataclass(frozen=True)
class LoadedModel(TextModel):
    """A `TextModel` with its weights, as views of the mapped files in the formats of the files."""

    weights: ModelWeights = field(kw_only=True)
    weights_digest: bytes = field(default=b"", kw_only=True)  # of the whole weights, where `weights` are changed

    def digest(self) -> bytes:
        """A digest of the first bytes of every matrix in the files."""
        return self.weights_digest or digest_of(self.weights)


def digest_of(weights: ModelWeights) -> bytes:
    digest = blake2b(digest_size=16)
    for matrix in weights.matrices():
        if isinstance(matrix, QuantizedTensor):
            digest.update(np.ascontiguousarray(matrix.data.reshape(-1)[:SAMPLED_BYTES]).tobytes())
    return digest.digest()
