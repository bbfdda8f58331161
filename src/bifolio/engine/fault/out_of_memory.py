"""Recovery from out-of-memory errors on the device: discard the step and continue with smaller ones.

Full blocks stay in the prefix cache, so that little is recomputed; the allocator releases cached memory; and:

    token budget   halves, and doubles again after `CALM_STEPS` good steps
    sequences      a quarter of them (at least one) waits, youngest first; the limit rises after `CALM_STEPS` good steps

A request that fails alone with the smallest steps ends with an error that names the settings to change.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from bifolio.errors import FaultKind
from bifolio.sequence import FinishReason, Request, StepResult

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine

logger = logging.getLogger(__name__)
STEP_FAILED = "the step that computed this request failed"  # first words of the message
CALM_STEPS = 32  # good steps after which the limits are relaxed
SMALLEST_BUDGET = 16  # tokens of a step; a smaller budget would make prefill too slow
MAX_FAILURES_ALONE = 3  # with the smallest steps; then the request does not fit


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is torch's out-of-memory error, or CUDA's (graph capture, kernel loading). Torch is not imported."""
    if type(error).__name__ == "OutOfMemoryError" and type(error).__module__.partition(".")[0] == "torch":
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


class _Alone(NamedTuple):
    """The request that failed alone, its progress, and its failures with the smallest steps and no further progress."""

    request_id: str = ""
    num_computed: int = 0
    failures: int = 0


class MemoryRecovery:
    """The limits on an engine's steps after memory ran out."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._budget = engine.config.token_budget
        self._good_steps = 0
        self._alone = _Alone()

    @property
    def token_budget(self) -> int:
        """Tokens of the next step: enough for every running sequence to decode and for a prompt to advance."""
        least = self._engine.batcher.num_running + SMALLEST_BUDGET
        return min(max(self._budget, least), self._engine.config.token_budget)

    @property
    def is_limited(self) -> bool:
        return self._budget < self._engine.config.token_budget or self._engine.batcher.max_running is not None

    def step_succeeded(self) -> None:
        """Relax the limits after `CALM_STEPS` good steps."""
        if not self.is_limited:
            return
        self._good_steps += 1
        if self._good_steps < CALM_STEPS:
            return
        self._good_steps = 0
        batcher = self._engine.batcher
        self._budget = min(2 * self._budget, self._engine.config.token_budget)
        if batcher.max_running is not None:
            more = batcher.max_running + max(1, batcher.max_running // 4)
            batcher.max_running = None if more >= batcher.max_slots else more

    def recover(self, error: Exception) -> list[StepResult]:
        """Discard the failed step and limit later ones; raises the error when no sequence was running."""
        batcher = self._engine.batcher
        batcher.evict_completed()
        num_running = batcher.num_running
        num_computed = sum(slot.held.num_computed for slot in batcher.active_slots())
        requests = self._engine.take_back()
        if not requests:
            raise error
        self._engine.runner.release_memory()
        self._good_steps = 0
        smallest = self._budget <= SMALLEST_BUDGET
        self._budget = max(self._budget // 2, min(SMALLEST_BUDGET, self._budget))
        if len(requests) > 1:
            batcher.max_running = max(1, num_running * 3 // 4)
            logger.warning(
                "out of memory in a step of %d sequences: continuing with %d, %d tokens a step (%s)",
                num_running, batcher.max_running, self._budget, error,
            )  # fmt: skip
            return []
        return self._failed_alone(requests[0], num_computed, error, smallest)

    def _failed_alone(self, request: Request, num_computed: int, error: Exception, smallest: bool) -> list[StepResult]:
        same = self._alone.request_id == request.request_id and num_computed <= self._alone.num_computed
        failures = smallest + (self._alone.failures if same else 0)
        self._alone = _Alone(request.request_id, num_computed, failures)
        if failures < MAX_FAILURES_ALONE:
            logger.warning("out of memory with one request alone: %d tokens a step (%s)", self._budget, error)
            return []
        logger.error("request %s does not fit into memory alone and was ended: %s", request.request_id, error)
        self._alone = _Alone()
        self._budget = self._engine.config.token_budget  # the request was too large, not the steps
        self._engine.batcher.max_running = None
        request.set_error(
            FaultKind.STEP_FAILED,
            f"{STEP_FAILED}: out of memory, even alone and in steps of {SMALLEST_BUDGET} tokens. Request fewer "
            "completions, beams or logprobs, or start the engine with a smaller cache (gpu_memory_utilization, memory)",
        )
        return self._engine.batcher.finish(request, FinishReason.ERROR)
