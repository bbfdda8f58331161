"""A step that runs out of the device's memory: it is taken back, and the engine goes on with smaller steps.

Full blocks stay in the prefix cache, so that little is computed twice; the allocator releases cached memory; and:

    token budget   halves, and doubles again after `CALM_STEPS` good steps
    sequences      the youngest quarter waits (one at least), and as many come back after `CALM_STEPS` good steps

A request that fails alone, however small its steps, ends with an error that says what to do.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from bifolio.sequence import FinishReason, Request, StepResult

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine

logger = logging.getLogger(__name__)
STEP_FAILED = "the step that computed this request failed"  # how `Request.error` begins
CALM_STEPS = 32  # good steps after which the limits are relaxed
SMALLEST_BUDGET = 16  # tokens of a step; below, a prompt would take forever
MAX_FAILURES_ALONE = 3  # with the smallest steps; then it is the request that does not fit


def is_out_of_memory(error: BaseException) -> bool:
    """Torch's own error, or CUDA's from elsewhere (capturing a graph, loading a kernel). Torch is not imported."""
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
        """Tokens of the next step: every running sequence may decode, and a prompt gets on."""
        least = self._engine.batcher.num_running + SMALLEST_BUDGET
        return min(max(self._budget, least), self._engine.config.token_budget)

    @property
    def is_limited(self) -> bool:
        return self._budget < self._engine.config.token_budget or self._engine.batcher.max_running is not None

    def step_succeeded(self) -> None:
        """Relax the limits a little after a number of good steps."""
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
        """Take back the failed step and plan smaller ones; raises the error when no sequence ran."""
        batcher = self._engine.batcher
        batcher.evict_completed()
        num_running = batcher.num_running
        num_computed = sum(slot.held.num_computed for slot in batcher.active_slots())
        requests = self._engine.take_back()
        if not requests:
            raise error
        self._engine.runner.kernels.release_memory()
        self._good_steps = 0
        smallest = self._budget <= SMALLEST_BUDGET
        self._budget = max(self._budget // 2, min(SMALLEST_BUDGET, self._budget))
        if len(requests) > 1:
            batcher.max_running = max(1, num_running * 3 // 4)
            logger.warning(
                "out of memory in a step of %d sequences: going on with %d, %d tokens a step (%s)",
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
        request.error = (
            f"{STEP_FAILED}: out of memory, even alone and in steps of {SMALLEST_BUDGET} tokens. Ask for fewer "
            "completions, beams or logprobs, or start the engine with a smaller cache (gpu_memory_utilization, memory)"
        )
        return self._engine.batcher.finish(request, FinishReason.ERROR)
