"""The data of planning: the slots of the batch, and the frozen plan of one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from bifolio.cache.table_states import StatePass, StateRequest
from bifolio.errors import PhaseError
from bifolio.sequence import RequestPhase, Sequence


@dataclass(slots=True)
class BatchSlot:
    """A permanent place in the batch and its present sequence, which the other properties are read from."""

    index: int
    sequence: Sequence | None = None
    sample_slots: tuple[int, ...] = ()  # its own slot, and those of its later forks
    waits_for_tokens: bool = False  # its next draw depends on token values: not planned while a step is in flight
    alone: tuple[int, ...] = field(init=False)  # its own slot

    def __post_init__(self) -> None:
        self.alone = (self.index,)

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


class ScheduledSequence(NamedTuple):
    """Tokens [start, start + num_new) of one sequence run in this step.

    |<-- computed or in flight -->|<-------- num_new -------->|<- not in this step ->|
                                  start
    """

    slot: int
    sequence: Sequence
    start: int
    num_new: int
    sample_slots: tuple[int, ...]  # slots that sample from the last logits: none, its own, or also its forks'
    drafts: tuple[int, ...] = ()  # draft tokens after the last known one; part of num_new


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Decodes first, then prefill chunks; segments of the flat batch in this order."""

    decodes: tuple[ScheduledSequence, ...] = ()
    prefills: tuple[ScheduledSequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    states: tuple[StatePass, ...] | None = None  # of `scheduled`, if the model has recurrent layers
    is_short: bool = False  # too few free blocks, and preemption has to wait for the step in flight
    is_verified: bool = False  # one launch on the device verifies and accepts the drafts
    is_uniform: bool = False  # every decode is known to be one token of a sequence without a group

    def split(self) -> tuple[StepPlan, StepPlan]:
        """(Sequences that generate, sequences whose hidden states are pooled); a pass of each runs in the step."""
        pooled = [item.sequence.request.pooling is not None for item in self.scheduled]
        if not any(pooled):
            return self, StepPlan()

        def part(wanted: bool) -> StepPlan:
            prefills = tuple(item for item in self.prefills if (item.sequence.request.pooling is not None) == wanted)
            states = self.states
            if states is not None:
                states = tuple(state for state, is_pooled in zip(states, pooled, strict=True) if is_pooled == wanted)
            return replace(self, decodes=() if wanted else self.decodes, prefills=prefills, states=states)

        return part(False), part(True)

    @property
    def has_plain_decodes(self) -> bool:
        """Whether every decode is one token of a sequence without a group."""
        return self.is_uniform or all(item.num_new == 1 and item.sequence.group is None for item in self.decodes)

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prefills

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new for item in self.scheduled)

    def state_requests(self) -> Iterator[StateRequest]:
        """The passes of `scheduled`, for the choice of their recurrent states."""
        for _, sequence, start, num_new, _, drafts in self.decodes:
            yield StateRequest(sequence.id, start, num_new, len(drafts))
        for item in self.prefills:
            known = item.sequence.num_tokens
            yield StateRequest(item.sequence.id, item.start, item.num_new, len(item.drafts), known)

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        return self.decodes + self.prefills
