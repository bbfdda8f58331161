"""A detector of livelocks: an engine that has work and makes no progress names and ends the request in its way."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from bifolio.engine.fault.out_of_memory import STEP_FAILED
from bifolio.errors import FaultKind
from bifolio.sequence import FinishReason, Request, StepResult

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine

logger = logging.getLogger(__name__)
PATIENCE = 1000  # steps without a token or an end, beyond those that the longest prompt takes


class ProgressWatch:
    """Counts steps without a result. No schedule needs as many as the limit; a livelock reaches it within seconds."""

    def __init__(self, engine: InferenceEngine) -> None:
        config = engine.config
        self._engine = engine
        self._num_idle = 0
        self.limit = PATIENCE + 8 * -(-config.max_model_len // min(config.chunk_size, config.token_budget))

    def observe(self, results: list[StepResult]) -> list[StepResult]:
        """After every step: the results of ending a request, if the engine was stuck."""
        tiers = self._engine.tiers
        if results or not self._engine.requests or (tiers is not None and tiers.has_tickets):
            self._num_idle = 0
            return []
        self._num_idle += 1
        if self._num_idle <= self.limit:
            return []
        self._num_idle = 0
        request = self._culprit()
        logger.error("no progress in %d steps: request %s is ended", self.limit, request.request_id)
        request.set_error(FaultKind.STEP_FAILED, f"{STEP_FAILED}: no progress in {self.limit} steps")
        return self._engine.batcher.finish(request, FinishReason.ERROR)

    def _culprit(self) -> Request:
        """The first request in order that holds a slot; the first that waits where none does."""
        running = {slot.held.request.request_id: slot.held.request for slot in self._engine.batcher.active_slots()}
        candidates = running or self._engine.requests
        return min(candidates.values(), key=lambda request: request.sequences[0].order)
