"""Results of a request, with the field names of vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from bifolio.sequence import Request, RequestMetrics, Sequence, TokenLogprob

Decode: TypeAlias = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The logprob of a token at a position."""

    logprob: float
    rank: int | None = None  # 1: the most likely token
    decoded_token: str | None = None


class PositionLogprobs(dict[int, Logprob]):
    """Token id → `Logprob` at one position: the token that was taken first, then the most likely ones.

    `token_id`, `logprob` and `rank` are those of the token that was taken, `top` has the others as pairs.
    """

    def __init__(self, scored: TokenLogprob, decode: Decode | None = None) -> None:
        self.token_id, self.logprob, self.rank, self.top = scored.token_id, scored.logprob, scored.rank, scored.top
        entries = {scored.token_id: (scored.logprob, scored.rank)}
        for number, (token_id, logprob) in enumerate(scored.top, start=1):
            entries.setdefault(token_id, (logprob, number))
        super().__init__(
            (token_id, Logprob(logprob, rank, None if decode is None else decode(token_id)))
            for token_id, (logprob, rank) in entries.items()
        )


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # None unless logprobs were requested
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None  # "stop", "length", "abort" or "error"; None while it runs
    stop_reason: int | str | None = None
    score: float | None = None  # of a beam: its logprob over its length to the power of the length penalty

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """One text of a beam search as vLLM returns it: the prompt is part of `tokens` and `text`."""

    tokens: list[int]
    text: str
    cum_logprob: float
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its completions; sorted best first if `best_of` exceeds `n`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache."""
        return self.metrics.num_cached_tokens

    @property
    def sequences(self) -> list[BeamSequence]:
        """The texts of a beam search, best first, with the prompt before each."""
        return [
            BeamSequence(
                [*self.prompt_token_ids, *output.token_ids],
                (self.prompt or "") + output.text,
                output.cumulative_logprob or 0.0,
                output.logprobs,
                output.finish_reason,
                output.stop_reason,
            )
            for output in self.outputs
        ]


def request_output(request: Request, decode: Decode | None = None) -> RequestOutput:
    """The state of a request as its caller sees it; `decode` writes tokens beside their logprobs."""
    chosen = request.sequences
    if request.search is not None:
        chosen = chosen[: len(request.search.results())]
    elif request.is_finished and len(chosen) > request.params.n:
        chosen = sorted(chosen, key=_mean_logprob, reverse=True)[: request.params.n]
    scored = request.prompt_logprobs
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=None if scored is None else [e if e is None else PositionLogprobs(e, decode) for e in scored],
        outputs=[_completion(request, sequence, index, decode) for index, sequence in enumerate(chosen)],
        finished=request.is_finished,
        metrics=request.metrics,
        error=request.error,
    )


def _completion(request: Request, sequence: Sequence, index: int, decode: Decode | None) -> CompletionOutput:
    wanted = request.params.logprobs is not None
    summed = wanted or request.search is not None
    return CompletionOutput(
        index=index,
        text=sequence.text,
        token_ids=list(sequence.output_token_ids),
        cumulative_logprob=sequence.cumulative_logprob if summed else None,
        logprobs=[PositionLogprobs(entry, decode) for entry in sequence.logprobs] if wanted else None,
        finish_reason=None if sequence.finish_reason is None else sequence.finish_reason.value,
        stop_reason=sequence.stop_reason,
        score=sequence.score,
    )


def _mean_logprob(sequence: Sequence) -> float:
    return sequence.cumulative_logprob / max(len(sequence.output_token_ids), 1)
