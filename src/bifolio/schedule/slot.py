"""`BatchSlot`: a permanent row number and the sequence that holds it now."""

from __future__ import annotations

from dataclasses import dataclass

from bifolio.errors import PhaseError
from bifolio.sequence import RequestPhase, Sequence


@dataclass(slots=True)
class BatchSlot:
    """Locates a sequence in the device rows; what it knows about it, it reads from the sequence."""

    index: int
    sequence: Sequence | None = None
    sample_slots: tuple[int, ...] = ()  # its own row, and the rows of sequences that will be forked from it

    @property
    def held(self) -> Sequence:
        if self.sequence is None:
            raise PhaseError(f"slot {self.index} is empty")
        return self.sequence

    @property
    def request_id(self) -> str | None:
        return None if self.sequence is None else self.sequence.request.request_id

    @property
    def phase(self) -> RequestPhase | None:
        return None if self.sequence is None else self.sequence.phase

    @property
    def tokens_generated(self) -> int:
        return 0 if self.sequence is None else len(self.sequence.output_token_ids)

    @property
    def max_tokens(self) -> int:
        return 0 if self.sequence is None else self.sequence.request.max_tokens
