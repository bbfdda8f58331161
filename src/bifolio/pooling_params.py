"""`PoolingParams`: the options of a request for a vector or for scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from bifolio.errors import RequestError

PoolingTask = Literal["embed", "token_embed", "classify", "score"]
TASKS = ("embed", "token_embed", "classify", "score")


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Options of `LLM.embed`, `LLM.encode`, `LLM.classify` and `LLM.score`, with the names of vLLM.

    `dimensions` keeps the first values of a vector, of models that were trained for it (Matryoshka). `use_activation`
    (also `normalize`): vectors have a length of 1, and logits become scores; None: as the model's files say.
    `truncate_prompt_tokens` keeps the first tokens of a text, -1 as many as the model takes; None: longer texts are
    refused. `task` is set by the methods of `LLM`.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None
    task: PoolingTask | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise RequestError(f"task is one of {', '.join(TASKS)}, not {self.task!r}")
        _check_count("dimensions", self.dimensions, 1)
        check_truncation(self.truncate_prompt_tokens)
        if None not in (self.use_activation, self.normalize) and self.use_activation != self.normalize:
            raise RequestError("use_activation and normalize are two names of one option: pass one of them")

    @property
    def activated(self) -> bool | None:
        """Whether vectors are normalised and logits become scores; None: as the model's files say."""
        return self.normalize if self.use_activation is None else self.use_activation


def check_truncation(value: int | None) -> None:
    """Refuse numbers of tokens that no text can be cut to."""
    _check_count("truncate_prompt_tokens", value, -1)
    if value == 0:
        raise RequestError("truncate_prompt_tokens is 0: pass at least 1, or -1 for as many as the model takes")


def _check_count(name: str, value: Any, least: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise RequestError(f"{name} is a whole number of at least {least}, not {value!r}")
