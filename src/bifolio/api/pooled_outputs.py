"""Results of requests for vectors and scores, with the field names of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bifolio.sequence import Request

Output = TypeVar("Output", bound="PoolingOutput", covariant=True)


@dataclass(frozen=True, slots=True, eq=False)
class PoolingOutput:
    """f32[d] of a text, f32[tokens, d] of its tokens, or f32[labels]."""

    data: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]


class EmbeddingOutput(PoolingOutput):
    """The vector of a text."""

    @property
    def embedding(self) -> list[float]:
        values: list[float] = self.data.tolist()
        return values

    @property
    def hidden_size(self) -> int:
        return int(self.data.shape[-1])


class ClassificationOutput(PoolingOutput):
    """The score of each label."""

    @property
    def probs(self) -> list[float]:
        values: list[float] = self.data.tolist()
        return values

    @property
    def num_classes(self) -> int:
        return len(self.data)


class ScoringOutput(PoolingOutput):
    """The score of a pair of texts."""

    @property
    def score(self) -> float:
        return float(self.data)


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[Output]):
    """A text and its result."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


def pooled_output(request: Request, kind: type[Output]) -> PoolingRequestOutput[Output]:
    """The result of a finished request."""
    value: NDArray[np.float32] = request.pooling.value
    cached = request.metrics.num_cached_tokens
    return PoolingRequestOutput(request.request_id, kind(value), request.prompt_token_ids, True, cached)
