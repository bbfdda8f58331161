"""Results of a request, with the field names of vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.sequence import Request, RequestMetrics, Sequence, TokenLogprob


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # None unless logprobs were requested
    logprobs: list[TokenLogprob] | None
    finish_reason: str | None  # "stop", "length", "abort" or "error"; None while it runs
    stop_reason: int | str | None = None
    score: float | None = None  # of a beam: its logprob over its length to the power of the length penalty


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its completions; sorted best first if `best_of` exceeds `n`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None


def request_output(request: Request) -> RequestOutput:
    """Convert the state of a request to its public form."""
    chosen = request.sequences
    if request.search is not None:
        chosen = chosen[: len(request.search.results())]
    elif request.is_finished and len(chosen) > request.params.n:
        chosen = sorted(chosen, key=_mean_logprob, reverse=True)[: request.params.n]
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        prompt_logprobs=request.prompt_logprobs,
        outputs=[_completion(request, sequence, index) for index, sequence in enumerate(chosen)],
        finished=request.is_finished,
        metrics=request.metrics,
        error=request.error,
    )


def _completion(request: Request, sequence: Sequence, index: int) -> CompletionOutput:
    wanted = request.params.logprobs is not None
    summed = wanted or request.search is not None
    return CompletionOutput(
        index=index,
        text=sequence.text,
        token_ids=list(sequence.output_token_ids),
        cumulative_logprob=sequence.cumulative_logprob if summed else None,
        logprobs=list(sequence.logprobs) if wanted else None,
        finish_reason=None if sequence.finish_reason is None else sequence.finish_reason.value,
        stop_reason=sequence.stop_reason,
        score=sequence.score,
    )


def _mean_logprob(sequence: Sequence) -> float:
    return sequence.cumulative_logprob / max(len(sequence.output_token_ids), 1)
