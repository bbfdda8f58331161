"""Results of a request, with the field names of vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

from bifolio.errors import RequestError
from bifolio.sequence import FinishReason, Request, RequestMetrics, Sequence, TokenLogprob

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


class OutputLogprobs(Sequences[PositionLogprobs]):
    """The logprobs of an output, one entry for each token; entries are made when they are read."""

    __slots__ = ("_decode", "_entries", "_scored")

    def __init__(self, scored: Sequences[TokenLogprob], decode: Decode | None = None) -> None:
        self._scored = scored
        self._decode = decode
        self._entries: list[PositionLogprobs] | None = None

    def __len__(self) -> int:
        return len(self._scored)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> list[PositionLogprobs]: ...

    def __getitem__(self, index: int | slice) -> PositionLogprobs | list[PositionLogprobs]:
        if self._entries is None:
            self._entries = [PositionLogprobs(scored, self._decode) for scored in self._scored]
        return self._entries[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputLogprobs | list) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # None unless logprobs were requested
    logprobs: Sequences[PositionLogprobs] | None
    finish_reason: str | None  # "stop", "length", "abort" or "error"; None while it runs
    stop_reason: int | str | None = None
    score: float | None = None  # of a beam: its logprob over its length to the power of the length penalty

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class Score:
    """The logprobs of given tokens behind a branch."""

    token_ids: list[int]
    logprobs: list[float]  # of each token, after all tokens before it
    ranks: list[int]  # 1: the most likely token

    @property
    def total(self) -> float:
        """The logprob of all tokens together."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the most likely one."""
        return all(rank == 1 for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """One text of a beam search as vLLM returns it: the prompt is part of `tokens` and `text`."""

    tokens: list[int]
    text: str
    cum_logprob: float
    logprobs: Sequences[PositionLogprobs] | None
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
    receipt: dict[str, Any] | None = None  # of a call with `receipts=True`

    @property
    def weight_version(self) -> int:
        """The version of the weights that computed the last token; 0 until `LLM.load_weights` was called."""
        return self.metrics.weight_version

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
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=prompt_scores(request, decode),
        outputs=[_completion(request, each, index, decode) for index, each in enumerate(returned_sequences(request))],
        finished=request.is_finished,
        metrics=request.metrics,
        error=request.error,
    )


def scored_continuation(request: Request) -> Score:
    """The result of a request that scores the end of its prompt."""
    if request.error is not None or request.prompt_scores is None:
        raise RequestError(f"the continuation could not be scored: {request.error or 'the request was aborted'}")
    scored = list(request.prompt_scores)
    return Score([one.token_id for one in scored], [one.logprob for one in scored], [one.rank for one in scored])


def prompt_scores(request: Request, decode: Decode | None) -> list[PositionLogprobs | None] | None:
    """The logprobs of the prompt, complete from the first output token on; None if they were not asked for."""
    scored = request.prompt_logprobs
    return None if scored is None else [each if each is None else PositionLogprobs(each, decode) for each in scored]


def returned_sequences(request: Request) -> list[Sequence]:
    """The sequences that the caller sees; of a finished request the best ones, best first."""
    if request.search is not None:
        return _hypotheses(request)
    if request.is_finished and len(request.sequences) > request.params.n:
        return sorted(request.sequences, key=_mean_logprob, reverse=True)[: request.params.n]
    return request.sequences


def _hypotheses(request: Request) -> list[Sequence]:
    """The results of a beam search, which may be fewer than beams; of one that failed, its best running hypothesis."""
    if not request.is_finished:
        return []
    if request.sequences[0].finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
        return request.sequences[: len(request.search.results())]
    return (request.search.live() or request.sequences)[:1]


def _completion(request: Request, sequence: Sequence, index: int, decode: Decode | None) -> CompletionOutput:
    wanted = request.params.logprobs is not None
    summed = wanted or request.search is not None
    return CompletionOutput(
        index=index,
        text=sequence.text,
        token_ids=sequence.new_token_ids,
        cumulative_logprob=sequence.cumulative_logprob if summed else None,
        logprobs=OutputLogprobs(sequence.logprobs.copy(request.num_given), decode) if wanted else None,
        finish_reason=None if sequence.finish_reason is None else sequence.finish_reason.value,
        stop_reason=sequence.stop_reason,
        score=sequence.score,
    )


def _mean_logprob(sequence: Sequence) -> float:
    return sequence.cumulative_logprob / max(len(sequence.output_token_ids), 1)
