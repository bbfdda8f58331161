"""A model without its weights (`TextModel`) and with them (`LoadedModel`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from bifolio.config import ModelConfig, PoolingConfig
from bifolio.errors import RequestError
from bifolio.model.sampling_defaults import sampling_defaults
from bifolio.model.vision.tower import Tower, Vision
from bifolio.model.weights import ModelWeights
from bifolio.quant.mapped import mapping_of
from bifolio.quant.tensor import QuantizedTensor
from bifolio.text.chat_template import render_chat
from bifolio.text.infill import InfillTokens, infill_tokens
from bifolio.text.pairs import PairTemplate
from bifolio.text.tokenizer import Tokenizer

SAMPLED_BYTES = 4096  # of each matrix, for its digest
PAIR_ROLES = {"query": "<query text>", "document": "<document text>"}  # of chat templates of rerankers


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
    vision: Vision | None = None  # how it takes images; None: it reads text only
    pooling: PoolingConfig = field(default_factory=PoolingConfig)  # of vectors and scores

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, built on first use; None if the files have none."""
        return None if self.tokenizer_source is None else self.tokenizer_source()

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """Values of `generation_config.json` for requests that set none: the model's own, else filtered ones."""
        return sampling_defaults(self.generation_config, self.config.num_parameters)

    @cached_property
    def pair_template(self) -> PairTemplate | None:
        """The prompt in which a reranker reads a query and a document; None: it reads them as a pair of texts."""
        pooling, template = self.pooling, self.chat_template
        if pooling.pair_template is not None:
            return PairTemplate(*pooling.pair_template)
        if pooling.head is None or pooling.head.score is None or template is None:
            return None
        if not all(re.search(f"['\"]{role}['\"]", template) for role in PAIR_ROLES):
            return None
        roles = {"system": pooling.prompts.get(pooling.default_prompt or "", ""), **PAIR_ROLES}
        messages = [{"role": role, "content": content} for role, content in roles.items() if content]
        rendered = render_chat(template, messages, special_tokens=self.special_tokens)
        found = PairTemplate.of_text(rendered, *PAIR_ROLES.values())
        if found is None:
            raise RequestError(f"the chat template of {self.path.name} does not render a query, and then a document")
        return found

    @cached_property
    def infill(self) -> InfillTokens | None:
        """The tokens that mark a text with a gap; None if the vocabulary has none."""
        return None if self.tokenizer is None else infill_tokens(self.tokenizer, self.special_tokens)

    def require_infill(self) -> InfillTokens:
        self.require_tokenizer()
        if self.infill is None:
            raise RequestError(
                f"{self.path.name} cannot fill in the middle, because its vocabulary has no tokens that mark the text "
                "before and after a gap: leave the suffix out, or use a model such as Qwen2.5-Coder or StarCoder2"
            )
        return self.infill

    def check_generates(self) -> None:
        """Raise RequestError for an encoder."""
        if not self.config.language_head:
            raise RequestError(
                f"{self.path.name} generates no text, because it has no language head: ask it for "
                f"{'vectors (embed)' if self.pooling.head is None else 'scores (classify or score)'}"
            )

    def require_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"{self.path} has no tokenizer: pass prompts as lists of token ids")
        return self.tokenizer


@dataclass(frozen=True)
class LoadedModel(TextModel):
    """A `TextModel` with its weights, as views of the mapped files in the formats of the files."""

    weights: ModelWeights = field(kw_only=True)
    tower: Tower | None = field(default=None, kw_only=True)  # reads images
    exchanged: Mapping[str, QuantizedTensor] | None = field(default=None, kw_only=True, repr=False)  # by name in files
    digest_source: Callable[[], bytes] | None = field(default=None, kw_only=True, repr=False)  # of changed weights

    def digest(self) -> bytes:
        """A digest of the first bytes of every matrix in the files."""
        return self.later_digest()()

    def later_digest(self) -> Callable[[], bytes]:
        """`digest` for a time when `weights` are changed: mapped files are read when it is called, not before."""
        if self.digest_source is not None:
            return self.digest_source
        beginnings = [first_bytes(matrix) for matrix in self.weights.matrices() if isinstance(matrix, QuantizedTensor)]
        if all(mapping_of(part) is not None for part in beginnings):
            return partial(digest_of, beginnings)
        found = digest_of(beginnings)  # arrays in memory are not kept
        return lambda: found


def first_bytes(matrix: QuantizedTensor) -> np.ndarray:
    """A view of the first rows of a matrix, as many as hold `SAMPLED_BYTES`."""
    stored = matrix.stored
    return stored[: -(-SAMPLED_BYTES // max(stored.shape[-1], 1))]


def digest_of(beginnings: Sequence[np.ndarray]) -> bytes:
    digest = blake2b(digest_size=16)
    for rows in beginnings:
        digest.update(rows.tobytes()[:SAMPLED_BYTES])
    return digest.digest()
