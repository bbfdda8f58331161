"""The call of `AsyncLLM.generate`: awaited for the finished outputs, or iterated over while they grow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any

from bifolio.api.outputs import CompletionOutput, Decode, PositionLogprobs, RequestOutput, prompt_scores
from bifolio.sampling_params import RequestOutputKind
from bifolio.sequence import Request, StepResult


class Generation(Coroutine[Any, Any, list[RequestOutput]]):
    """`await` gives a list of outputs; `async for` gives one `RequestOutput` after another, as vLLM does.

    It is a coroutine, so `asyncio.create_task` and `gather` take it.
    """

    def __init__(
        self,
        finished: Callable[[], Coroutine[Any, Any, list[RequestOutput]]],
        growing: Callable[[], AsyncIterator[RequestOutput]],
    ) -> None:
        self._finished = finished
        self._growing = growing
        self._running: Coroutine[Any, Any, list[RequestOutput]] | None = None

    def __await__(self) -> Generator[Any, None, list[RequestOutput]]:
        return self._finished().__await__()

    def send(self, value: Any) -> Any:
        return self._started().send(value)

    def throw(self, *error: Any) -> Any:
        return self._started().throw(*error)

    def close(self) -> None:
        if self._running is not None:
            self._running.close()

    def _started(self) -> Coroutine[Any, Any, list[RequestOutput]]:
        if self._running is None:
            self._running = self._finished()
        return self._running

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self._growing()


@dataclass(slots=True)
class _Part:
    """One completion so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class GrowingOutput:
    """The outputs of one request, collected from step results: the engine's own state belongs to its thread."""

    def __init__(self, request: Request, decode: Decode | None) -> None:
        self._request = request
        self._decode = decode
        self._parts = [_Part() for _ in request.sequences]
        self._scores: list[PositionLogprobs | None] | None = None  # of the prompt
        self.kind = request.params.output_kind

    def add(self, result: StepResult) -> RequestOutput:
        """The output after a step: everything so far, or the new part alone."""
        part = self._parts[result.index]
        if self.kind is RequestOutputKind.DELTA:
            part.text, part.token_ids, part.logprobs = "", [], []
        part.text += result.text
        if result.token is not None:
            part.token_ids.append(result.token)
        if result.logprob is not None:
            part.logprobs.append(PositionLogprobs(result.logprob, self._decode))
            part.cumulative_logprob += result.logprob.logprob
        if result.finish_reason is not None:
            part.finish_reason = result.finish_reason.value
            part.stop_reason = None if result.sequence is None else result.sequence.stop_reason
        indices = [result.index] if self.kind is RequestOutputKind.DELTA else range(len(self._parts))
        request = self._request
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=self._prompt_scores(),
            outputs=[self._completion(index) for index in indices],
            finished=all(part.finish_reason is not None for part in self._parts),
            metrics=request.metrics,
            error=request.error,
        )

    def _prompt_scores(self) -> list[PositionLogprobs | None] | None:
        if self._scores is None:
            self._scores = prompt_scores(self._request, self._decode)
        return self._scores

    def _completion(self, index: int) -> CompletionOutput:
        part, wanted = self._parts[index], self._request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=part.text,
            token_ids=list(part.token_ids),
            cumulative_logprob=part.cumulative_logprob if wanted else None,
            logprobs=list(part.logprobs) if wanted else None,
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
        )
