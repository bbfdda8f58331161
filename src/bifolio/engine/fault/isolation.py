"""Isolation of a failing request: find it by bisection, end it, and continue the others.

The error of a step does not identify the request that caused it, so the requests of the step are retried in halves:

    failed step      [a b c d]           all launched steps are taken back; full blocks stay in the prefix cache
    trial            [a b]   parked [c d and all others]
    passed           -> next trial [c d];   failed -> next trial [a], parked [b c d ...]
    a trial of one   failed -> that request ends with FinishReason.ERROR

Only such a trial convicts a request: the cause of a failed step may be a request that ended in it. A trial is passed
when each of its sequences has computed more than it had when the step failed, or has ended. Tokens generated before are
kept; keys and values are recomputed, mostly from the prefix cache. Requests that arrive meanwhile wait for a few steps
until the failing request is found.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bifolio.engine.fault.out_of_memory import STEP_FAILED
from bifolio.errors import FaultKind
from bifolio.sequence import FinishReason, Request, Sequence, StepResult

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine

logger = logging.getLogger(__name__)
MAX_FAILURES_IN_A_ROW = 3  # failing requests without a good step between them: the engine is broken and stops


@dataclass(slots=True)
class Trial:
    """Requests that may have caused the failure, and the progress each of their sequences needs to pass."""

    requests: list[Request]
    goals: dict[int, int] = field(default_factory=dict)  # sequence id -> tokens that must be computed

    def passed(self) -> bool:
        return all(
            sequence.finish_reason is not None or sequence.num_computed >= self.goals.get(sequence.id, 0)
            for request in self.requests
            for sequence in request.sequences
            if not sequence.is_dormant
        )


class Isolation:
    """Finds the request that makes a step fail."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._trials: list[Trial] = []  # the last one is running
        self._parked: list[Sequence] = []  # wait until the trials are over
        self._failures = 0  # since the last good step

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def is_on(self) -> bool:
        """Whether trials are running."""
        return bool(self._trials or self._parked)

    def hold_back(self) -> None:
        """Park waiting sequences that are not on trial, before a step."""
        if not self._trials:
            return
        on_trial = {request.request_id for request in self._trials[-1].requests}
        batcher = self._engine.batcher
        waiting = [*self._parked, *batcher.take_waiting()]
        self._parked = []
        for sequence in waiting:
            if sequence.finish_reason is not None:
                continue
            if sequence.request.request_id in on_trial:
                batcher.wait(sequence)
            else:
                self._parked.append(sequence)

    def step_succeeded(self) -> None:
        self._failures = 0
        if self._trials and self._trials[-1].passed():
            self._trials.pop()
            self._next_trial()

    def recover(self, error: Exception) -> list[StepResult]:
        """Discard the failed step and start the next trial; raises the error when the engine itself is the cause."""
        goals = self._goals()
        suspects = [request for request in self._engine.take_back() if not request.is_finished]
        was_alone = False
        if self._trials:
            trial = self._trials.pop()
            was_alone = len(trial.requests) == 1
            on_trial = {request.request_id for request in trial.requests}
            suspects = [request for request in suspects if request.request_id in on_trial]
            goals = {**goals, **trial.goals}
        if not suspects:  # the requests of the step have ended
            self._count_failure(error)
            self._next_trial()
            return []
        if was_alone:
            return self._convict(suspects[0], error)
        logger.warning("a step failed (%r): looking for the cause among %d requests", error, len(suspects))
        middle = (len(suspects) + 1) // 2
        halves = [suspects[middle:], suspects[:middle]]
        self._trials += [Trial(half, goals) for half in halves if half]
        return []

    def _goals(self) -> dict[int, int]:
        """The progress with which each running sequence passes."""
        running = (slot.held for slot in self._engine.batcher.active_slots())
        return {s.id: min(s.num_computed + 1, s.num_tokens) for s in running if s.finish_reason is None}

    def _count_failure(self, error: Exception) -> None:
        self._failures += 1
        if self._failures > MAX_FAILURES_IN_A_ROW:
            raise error

    def _convict(self, request: Request, error: Exception) -> list[StepResult]:
        self._count_failure(error)
        logger.error("request %s failed and was ended: %r", request.request_id, error, exc_info=error)
        request.set_error(FaultKind.STEP_FAILED, f"{STEP_FAILED}: {type(error).__name__}")
        results = self._engine.batcher.finish(request, FinishReason.ERROR)
        self._next_trial()
        return results

    def _next_trial(self) -> None:
        """Empty the batch for the next trial, or queue all parked sequences again."""
        if self._trials:
            self._engine.take_back()
            return
        for sequence in self._parked:
            if sequence.finish_reason is None:
                self._engine.batcher.wait(sequence)
        self._parked = []
