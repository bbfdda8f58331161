"""`PoolingConfig`: how the hidden states of a text become a vector, or scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from bifolio.errors import ConfigError

PoolingKind = Literal["mean", "cls", "last", "none"]
ScoreActivation = Literal["none", "sigmoid", "softmax"]
POOLINGS = ("mean", "cls", "last", "none")
MOST_LABELS = 1 << 16


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The labels of a classifier, or the one score of a reranker."""

    labels: tuple[str, ...]
    activation: ScoreActivation = "softmax"  # from logits to scores
    score: int | None = None  # the label whose score is that of a pair of texts; None: the model scores no pairs

    def __post_init__(self) -> None:
        if not 0 < len(self.labels) <= MOST_LABELS:
            raise ConfigError(f"a classifier has between 1 and {MOST_LABELS} labels, not {len(self.labels)}")


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The way from the hidden states of a text to its vector or its scores."""

    kind: PoolingKind = "mean"
    normalize: bool = True  # vectors have a length of 1
    head: HeadConfig | None = None  # None: the model gives vectors
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts that are put before those to embed, by name
    default_prompt: str | None = None
    max_length: int | None = None  # the most tokens of a text that the model is meant for; None: those of the network
    lowercase: bool = False  # texts are lowercased before they are encoded
    size: int = 0  # of a vector; 0: that of a hidden state
    pair_template: tuple[str, str, str] | None = None  # text before a query, between it and a document, and after both

    def __post_init__(self) -> None:
        if self.kind not in POOLINGS:
            raise ConfigError(f"pooling is one of {', '.join(POOLINGS)}, not {self.kind!r}")
