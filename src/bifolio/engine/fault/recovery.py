"""Recovery of an engine from a failing step: discard the step and end one request at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bifolio.engine.fault.isolation import Isolation
from bifolio.engine.fault.out_of_memory import MemoryRecovery, is_out_of_memory
from bifolio.errors import EngineDeadError
from bifolio.sequence import StepResult

if TYPE_CHECKING:
    from bifolio.engine.engine import InferenceEngine


class FaultRecovery:
    """Selects the recovery: smaller steps after out-of-memory, isolation of one request after any other error."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.is_active = False  # a step has failed, and limits or trials are still in force
        self._memory = MemoryRecovery(engine)
        self._isolation = Isolation(engine)

    @property
    def token_budget(self) -> int:
        """Tokens of the next step."""
        return self._memory.token_budget

    @property
    def is_limited(self) -> bool:
        """Whether steps are smaller than configured after an out-of-memory error."""
        return self._memory.is_limited

    @property
    def num_parked(self) -> int:
        """Sequences that wait until the failing request is found."""
        return self._isolation.num_parked

    def before_step(self) -> None:
        self._isolation.hold_back()

    def step_succeeded(self) -> None:
        self._memory.step_succeeded()
        self._isolation.step_succeeded()
        self.is_active = self._memory.is_limited or self._isolation.is_on

    def recover(self, error: Exception) -> list[StepResult]:
        """Discard the failed step and continue; raises the error when the engine itself is broken."""
        if isinstance(error, EngineDeadError):  # a rank is lost
            raise error
        self.is_active = True
        if is_out_of_memory(error):
            return self._memory.recover(error)
        return self._isolation.recover(error)
