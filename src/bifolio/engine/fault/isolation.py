"""A step that raises: find the request at fault, end that one alone, and let the others go on.

A failing step says nothing about whose fault it is, so the requests that ran in it are put on trial in halves:

    failed step      [a b c d]           everybody loses row and slot; full blocks stay in the prefix cache
    trial            [a b]   parked [c d ...everyone else]
    passed           -> next trial [c d];   failed -> next trial [a], parked [b c d ...]
    a trial of one   failed -> that request ends with FinishReason.ERROR

A trial is passed when each of its sequences has computed more than it had when the step failed, or has ended. What was
generated before is kept; keys and values are recomputed, mostly from the prefix cache. Requests that arrive meanwhile
wait until the matter is settled: a handful of steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from bifolio.engine.engine import InferenceEngine
from bifolio.engine.fault.out_of_memory import STEP_FAILED
from bifolio.sequence import FinishReason, Request, Sequence, StepResult

logger = logging.getLogger(__name__)
MAX_FAILURES_IN_A_ROW = 3  # so many culprits without one good step: the engine itself is broken, a restart is due


@dataclass(slots=True)
class Trial:
    """Requests that may be at fault, and how far each of their sequences must come to be cleared."""

    requests: list[Request]
    goals: dict[int, int] = field(default_factory=dict)  # sequence id -> tokens that must be computed

    def passed(self) -> bool:
        return all(
            sequence.finish_reason is not None or sequence.num_computed >= self.goals.get(sequence.id, 0)
            for request in self.requests
            for sequence in request.sequences
            if not sequence.is_dormant
        )


class IsolatedSteps:
    """Steps an engine such that an error in a step harms one request at most."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._trials: list[Trial] = []  # the last one is on
        self._parked: list[Sequence] = []  # wait until the trials are over
        self._failures = 0  # since the last good step

    @property
    def has_work(self) -> bool:
        return self._engine.has_work or bool(self._parked)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def step(self) -> list[StepResult]:
        """`InferenceEngine.step`, which only raises when the engine as a whole is beyond repair."""
        if self._trials:
            self._hold_back()
        try:
            results = self._engine.step()
        except Exception as error:
            return self._recover(error)
        self._failures = 0
        if self._trials and self._trials[-1].passed():
            self._next_trial()
        return results

    # -- after a failure -------------------------------------------------------------------------------------------
    def _recover(self, error: Exception) -> list[StepResult]:
        suspects, goals = self._suspects()
        if not suspects:
            raise error
        self._take_all_rows_back()
        trial = self._trials.pop() if self._trials else None
        if trial is not None:
            on_trial = {request.request_id for request in trial.requests}
            suspects = [request for request in suspects if request.request_id in on_trial]
            goals = {**goals, **trial.goals}
            suspects = suspects or trial.requests
        if len(suspects) == 1:
            return self._convict(suspects[0], error)
        logger.warning("a step failed (%r): looking for the cause among %d requests", error, len(suspects))
        middle = len(suspects) // 2
        self._trials += [Trial(suspects[middle:], goals), Trial(suspects[:middle], goals)]
        return []

    def _suspects(self) -> tuple[list[Request], dict[int, int]]:
        """Requests that hold a slot, oldest first, and what clears each of their sequences."""
        requests: dict[str, Request] = {}
        goals: dict[int, int] = {}
        for slot in self._engine.batcher.active_slots():
            sequence = slot.held
            if sequence.finish_reason is None:
                requests[sequence.request.request_id] = sequence.request
                goals[sequence.id] = min(sequence.num_computed + 1, sequence.num_tokens)
        return sorted(requests.values(), key=lambda request: request.number), goals

    def _convict(self, request: Request, error: Exception) -> list[StepResult]:
        self._failures += 1
        if self._failures > MAX_FAILURES_IN_A_ROW:
            raise error
        logger.error("request %s failed and was ended: %r", request.request_id, error, exc_info=error)
        request.error = f"{STEP_FAILED}: {type(error).__name__}"
        results = self._engine.batcher.finish(request, FinishReason.ERROR)
        self._engine.requests.pop(request.request_id, None)
        self._next_trial(passed=False)
        return results

    def _take_all_rows_back(self) -> None:
        batcher = self._engine.batcher
        batcher.evict_completed()
        for slot in batcher.active_slots():
            if slot.sequence is not None and not slot.sequence.is_dormant:
                batcher.preempt(slot.sequence)

    # -- trials --------------------------------------------------------------------------------------------------------
    def _next_trial(self, passed: bool = True) -> None:
        if passed:
            self._trials.pop()
        if self._trials:
            self._take_all_rows_back()
            return
        batcher = self._engine.batcher
        for sequence in self._parked:
            if sequence.finish_reason is None:
                batcher.wait(sequence)
        self._parked = []

    def _hold_back(self) -> None:
        """Only those on trial may be given a slot."""
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
