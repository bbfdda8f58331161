"""What one step will do: frozen before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from bifolio.cache.block_pool import BlockCopy
from bifolio.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """Tokens [start, start + num_new) of one sequence run in this step.

    |<-- computed -->|<----- num_new ----->|<- not in this step ->|
                     start
    """

    slot: int  # permanent row of the sequence
    sequence: Sequence
    start: int
    num_new: int
    sample_slots: tuple[int, ...]  # rows to draw a token for from the last logits: none, its own, or the forks' too
    drafts: tuple[int, ...] = ()  # guessed tokens that follow the last known one; part of num_new


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Decodes first, then prefill chunks; segments of the flat batch in this order."""

    decodes: tuple[ScheduledSequence, ...] = ()
    prefills: tuple[ScheduledSequence, ...] = ()
    copies: tuple[BlockCopy, ...] = ()  # copy-on-write: run before any write
    preempted: tuple[Sequence, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prefills

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new for item in self.scheduled)

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        return self.decodes + self.prefills
