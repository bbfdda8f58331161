"""`PhaseManager`: reads and checks phases, and plans a step: decodes first, then prefill chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Sequences

from bifolio.errors import PhaseError, UnknownSequenceError
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.plan import ScheduledSequence, StepPlan
from bifolio.schedule.slot import BatchSlot
from bifolio.sequence import Sequence, SequencePhase

Preempt = Callable[[Sequence], None]


class PhaseManager:
    """Joins the two orchestrators. The phase of a sequence is not stored here: it follows from its progress."""

    def __init__(
        self,
        prefill_orchestrator: PrefillOrchestrator,
        decode_orchestrator: DecodeOrchestrator,
        *,
        chunk_size: int = 512,
        preempt: Preempt | None = None,
        drop_kept: Callable[[], bool] | None = None,
    ) -> None:
        self.prefill = prefill_orchestrator
        self.decode = decode_orchestrator
        self.chunk_size = chunk_size
        self._preempt = preempt
        self._drop_kept = drop_kept or (lambda: False)
        self._sequences: dict[int, Sequence] = {}

    # -- phases ---------------------------------------------------------------------------------------------
    def track(self, sequence: Sequence) -> None:
        self._sequences[sequence.id] = sequence

    def remove_sequence(self, sequence_id: int) -> None:
        self._sequences.pop(sequence_id, None)

    def get_phase(self, sequence_id: int) -> SequencePhase:
        return self._find(sequence_id).phase

    def is_prefilling(self, sequence_id: int) -> bool:
        return self.get_phase(sequence_id) is SequencePhase.PREFILL

    def is_decoding(self, sequence_id: int) -> bool:
        return self.get_phase(sequence_id) is SequencePhase.DECODE

    def set_phase(self, sequence_id: int, phase: SequencePhase) -> None:
        """Assert that the sequence is in this phase: progress alone moves it."""
        actual = self.get_phase(sequence_id)
        if actual is not phase:
            raise PhaseError(
                f"{self._find(sequence_id)} cannot be set to {phase.value}: its progress says {actual.value}"
            )

    def transition_to_decode(self, sequence_id: int) -> None:
        """The hard boundary: every token of the prompt is computed, or this is an error."""
        sequence = self._find(sequence_id)
        if sequence.phase is SequencePhase.COMPLETE:
            raise PhaseError(f"{sequence} has ended and cannot decode")
        if sequence.num_computed < sequence.num_prompt:
            raise PhaseError(
                f"{sequence} cannot decode: {sequence.num_prompt - sequence.num_computed} tokens of its prompt "
                "are not computed yet"
            )

    def _find(self, sequence_id: int) -> Sequence:
        if sequence_id not in self._sequences:
            raise UnknownSequenceError(f"no sequence {sequence_id} is tracked")
        return self._sequences[sequence_id]

    # -- planning ---------------------------------------------------------------------------------------------
    def plan(self, slots: Sequences[BatchSlot], token_budget: int, drafts: Mapping[int, int] | None = None) -> StepPlan:
        """Decide which tokens run next and reserve their blocks; preempt the youngest where blocks run out.

        `drafts` says for how many guessed tokens a decoding sequence (by id) wants room; they are dropped before
        anybody is preempted for them.
        """
        preempted: list[Sequence] = []
        active, decoding, waiting = _sorted_by_phase(slots)
        decodes = self._plan_decodes(active, decoding[:token_budget], token_budget, dict(drafts or {}), preempted)
        left = token_budget - sum(item.num_new for item in decodes)
        prefills = self._plan_prefills(active, waiting, left, preempted) if waiting and left > 0 else []
        if preempted:
            victims = {id(member) for victim in preempted for member in team(victim)}
            decodes = [item for item in decodes if id(item.sequence) not in victims]
            prefills = [item for item in prefills if id(item.sequence) not in victims]
        copies = tuple(self.decode.blocks.take_copies())
        return StepPlan(tuple(decodes), tuple(prefills), copies, tuple(preempted))

    def _plan_decodes(
        self,
        active: list[BatchSlot],
        running: list[BatchSlot],
        token_budget: int,
        drafts: dict[int, int],
        preempted: list[Sequence],
    ) -> list[ScheduledSequence]:
        if drafts:
            spare = token_budget - len(running)
            for slot in running:
                drafts[slot.held.id] = min(drafts.get(slot.held.id, 0), spare)
                spare -= drafts[slot.held.id]
            if not self.decode.reserve([(slot.held.id, 1 + drafts[slot.held.id]) for slot in running]):
                drafts.clear()
        while not drafts and running and not self.decode.reserve([(slot.held.id, 1) for slot in running]):
            if self._drop_kept():
                continue
            victim = max((slot.held for slot in active if slot.sequence is not None), key=lambda s: s.order)
            self._evict(victim, preempted)
            active[:] = [slot for slot in active if slot.sequence is not None]
            running = [slot for slot in running if slot.sequence is not None]
        scheduled = []
        for slot in running:
            sequence = slot.held
            num_new = 1 + drafts.get(sequence.id, 0) if drafts else 1
            scheduled.append(ScheduledSequence(slot.index, sequence, sequence.num_computed, num_new, (slot.index,)))
        return scheduled

    def _plan_prefills(
        self, active: list[BatchSlot], waiting: list[BatchSlot], budget: int, preempted: list[Sequence]
    ) -> list[ScheduledSequence]:
        scheduled: list[ScheduledSequence] = []
        for slot in sorted((slot for slot in waiting if slot.sequence is not None), key=lambda slot: slot.held.order):
            if budget < 1:
                break
            if slot.sequence is None or not self._has_row(slot.held):  # preempted in this step, or not yet opened
                continue
            sequence = slot.held
            limit = min(self.chunk_size, budget, _chunk_limit(sequence))
            if limit < 1:
                continue
            num_new = self.prefill.reserve_chunk(sequence, limit)
            while num_new == 0 and self._make_room(sequence, active, preempted):
                num_new = self.prefill.reserve_chunk(sequence, limit)
            if num_new == 0:
                break  # those behind wait as well: first come, first served
            budget -= num_new
            samples = slot.sample_slots if sequence.num_computed + num_new == sequence.num_tokens else ()
            scheduled.append(ScheduledSequence(slot.index, sequence, sequence.num_computed, num_new, samples))
        return scheduled

    def _has_row(self, sequence: Sequence) -> bool:
        """Members of a preempted group come back one by one, each on what those before it computed."""
        blocks = self.prefill.blocks
        if blocks.has_row(sequence.id):
            return True
        if sequence.group is None or not sequence.group.may_open(sequence):
            return False
        sequence.num_computed = blocks.open_row(sequence.id, sequence.token_ids, salt=sequence.request.salt)
        return True

    def _make_room(self, sequence: Sequence, active: Iterable[BatchSlot], preempted: list[Sequence]) -> bool:
        """Preempt one sequence that comes after this one; False when there is none."""
        if self._drop_kept():
            return True
        behind = [slot.held for slot in active if slot.sequence is not None and slot.held.order > sequence.order]
        if not behind:
            return False
        self._evict(max(behind, key=lambda s: s.order), preempted)
        return True

    def _evict(self, victim: Sequence, preempted: list[Sequence]) -> None:
        if self._preempt is None:
            raise PhaseError("blocks ran out and nobody told the planner how to preempt")
        self._preempt(victim)
        preempted.append(victim)


def _sorted_by_phase(
    slots: Sequences[BatchSlot],
) -> tuple[list[BatchSlot], list[BatchSlot], list[BatchSlot]]:
    """(all that run, those that can decode, those with a prompt to compute); one pass, since it is every step's."""
    active, decoding, waiting = [], [], []
    for slot in slots:
        sequence = slot.sequence
        if sequence is None or sequence.parent is not None:
            continue
        group = sequence.group
        if group is not None and not group.is_live(sequence):
            continue
        active.append(slot)
        phase = sequence.phase
        if phase is SequencePhase.PREFILL:
            waiting.append(slot)
        elif phase is SequencePhase.DECODE and (group is None or group.is_ready()):
            decoding.append(slot)
    return active, decoding, waiting


def _chunk_limit(sequence: Sequence) -> int:
    """Members of a group that come back leave their last token for the step they take together."""
    together = sequence.group is not None and bool(sequence.output_token_ids)
    return sequence.num_uncomputed - 1 if together else sequence.num_uncomputed


def team(sequence: Sequence) -> list[Sequence]:
    """The sequences that come and go with this one: beams of one search, or those to be forked from it."""
    if sequence.group is not None:
        return sequence.group.members
    return [sequence, *(child for child in sequence.request.sequences if child.parent is sequence)]
