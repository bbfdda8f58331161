"""A step that runs out of the device's memory: its plan fails, the engine goes on with less at a time.

Nothing of a failed step counts. Everyone's row is taken back (full blocks stay in the prefix cache, so that little is
computed twice), the allocator gives up what it hoards, and the next steps are smaller:

    token budget   halves, and doubles again after `CALM_STEPS` good steps
    sequences      the youngest quarter waits (one at least), and as many come back after `CALM_STEPS` good steps

A request that fails alone, however small its steps, ends with an error that says what to do.
"""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, NamedTuple

from bifolio.sequence import FinishReason, Request, StepResult

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine

logger = logging.getLogger(__name__)
STEP_FAILED = "the step that computed this request failed"  # how `Request.error` begins
CALM_STEPS = 32  # good steps after which a little more is dared
SMALLEST_BUDGET = 16  # tokens of a step; below, a prompt would take forever
MAX_FAILURES_ALONE = 3  # with the smallest steps; then it is the request that does not fit


def is_out_of_memory(error: BaseException) -> bool:
    """Torch's own error, or CUDA's from elsewhere (capturing a graph, loading a kernel). Torch is not imported."""
    if type(error).__name__ == "OutOfMemoryError" and type(error).__module__.partition(".")[0] == "torch":
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error)


class _Lonely(NamedTuple):
    """Who failed alone, how far it had come, and how often that was with the smallest steps and no further."""

    request_id: str = ""
    num_computed: int = 0
    failures: int = 0


class MemoryRecovery:
    """What an engine may do in one step, after it had to learn that."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self._budget = engine.config.token_budget
        self._good_steps = 0
        self._num_rows = 0  # sequences that held a row when a step failed
        self._num_computed = 0  # tokens they had computed between them
        self._alone = _Lonely()

    @property
    def token_budget(self) -> int:
        """Tokens of the next step: every running sequence may decode, and a prompt gets on."""
        least = self._engine.batcher.num_running + SMALLEST_BUDGET
        return min(max(self._budget, least), self._engine.config.token_budget)

    @property
    def is_limited(self) -> bool:
        return self._budget < self._engine.config.token_budget or self._engine.batcher.max_running is not None

    def step_succeeded(self) -> bool:
        """True when more may be done from now on."""
        if not self.is_limited:
            return False
        self._good_steps += 1
        if self._good_steps < CALM_STEPS:
            return False
        self._good_steps = 0
        batcher = self._engine.batcher
        self._budget = min(2 * self._budget, self._engine.config.token_budget)
        if batcher.max_running is not None:
            more = batcher.max_running + max(1, batcher.max_running // 4)
            batcher.max_running = None if more >= batcher.max_slots else more
        return True

    def recover(self, error: Exception) -> list[StepResult]:
        """Undo the failed step and plan for less; the error itself when nobody ran who could be put off."""
        requests = self._take_all_rows_back()
        if not requests:
            raise error
        self._release_memory()
        self._good_steps = 0
        smallest = self._budget <= SMALLEST_BUDGET
        self._budget = max(self._budget // 2, min(SMALLEST_BUDGET, self._budget))
        if len(requests) > 1:
            self._engine.batcher.max_running = max(1, self._num_rows * 3 // 4)
            logger.warning(
                "out of memory in a step of %d sequences: going on with %d, %d tokens a step (%s)",
                self._num_rows, self._engine.batcher.max_running, self._budget, error,
            )  # fmt: skip
            return []
        return self._failed_alone(requests[0], error, smallest)

    def _failed_alone(self, request: Request, error: Exception, smallest: bool) -> list[StepResult]:
        same = self._alone.request_id == request.request_id and self._num_computed <= self._alone.num_computed
        failures = smallest + (self._alone.failures if same else 0)
        self._alone = _Lonely(request.request_id, self._num_computed, failures)
        if failures < MAX_FAILURES_ALONE:
            logger.warning("out of memory with one request alone: %d tokens a step (%s)", self._budget, error)
            return []
        logger.error("request %s does not fit into memory alone and was ended: %s", request.request_id, error)
        self._alone = _Lonely()
        self._budget = self._engine.config.token_budget  # it was this one's fault
        self._engine.batcher.max_running = None
        request.error = (
            f"{STEP_FAILED}: out of memory, even alone and in steps of {SMALLEST_BUDGET} tokens. Ask for fewer "
            "completions, beams or logprobs, or start the engine with a smaller cache (gpu_memory_utilization, memory)"
        )
        results = self._engine.batcher.finish(request, FinishReason.ERROR)
        self._engine.requests.pop(request.request_id, None)
        return results

    def _take_all_rows_back(self) -> list[Request]:
        """Everyone who ran waits again; their requests, oldest first."""
        batcher = self._engine.batcher
        batcher.evict_completed()
        self._num_rows = batcher.num_running
        requests: dict[str, Request] = {}
        for slot in batcher.active_slots():
            if slot.sequence is not None:
                requests[slot.held.request.request_id] = slot.held.request
        self._num_computed = sum(slot.held.num_computed for slot in batcher.active_slots())
        for slot in batcher.active_slots():
            if slot.sequence is not None and not slot.sequence.is_dormant:
                batcher.preempt(slot.sequence)
        return sorted(requests.values(), key=lambda request: request.number)

    def _release_memory(self) -> None:
        if self._engine.runner.kernels.device.startswith("cuda"):
            import torch

            gc.collect()  # frames of the failed step may be part of a cycle
            torch.cuda.empty_cache()
