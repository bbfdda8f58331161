"""`PhaseManager`: reads and checks phases, and plans a step: decodes first, then prefill chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Sequences

from bifolio.cache.sharing import SpeculativeDecodingSharing
from bifolio.counts import whole
from bifolio.errors import ConfigError, OutOfBlocksError, PhaseError, UnknownSequenceError
from bifolio.images import whole_images
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.plan import BatchSlot, ScheduledSequence, StepPlan
from bifolio.schedule.shares import prefill_quotas
from bifolio.sequence import Sequence, SequencePhase, team

Preempt = Callable[[Sequence], None]


class PhaseManager:
    """Plans with both orchestrators. The phase of a sequence is not stored: it is derived from its progress."""

    def __init__(
        self,
        prefill_orchestrator: PrefillOrchestrator,
        decode_orchestrator: DecodeOrchestrator,
        *,
        chunk_size: int = 512,
        preempt: Preempt | None = None,
        drop_kept: Callable[[], bool] | None = None,
        speculation: SpeculativeDecodingSharing | None = None,
    ) -> None:
        self.prefill = prefill_orchestrator
        self.decode = decode_orchestrator
        self.chunk_size = whole("chunk_size", chunk_size, least=1, error=ConfigError)
        self._preempt = preempt
        self._drop_kept = drop_kept or (lambda: False)
        self._speculation = speculation
        self._sequences: dict[int, Sequence] = {}

    # -- phases ---------------------------------------------------------------------------------------------
    def track(self, sequence: Sequence) -> None:
        self._sequences[sequence.id] = sequence

    def remove_sequence(self, sequence_id: int) -> None:
        self._sequences.pop(sequence_id, None)
        if self._speculation is not None:
            self._speculation.forget(sequence_id)

    def get_phase(self, sequence_id: int) -> SequencePhase:
        return self._find(sequence_id).phase

    def is_prefilling(self, sequence_id: int) -> bool:
        return self.get_phase(sequence_id) is SequencePhase.PREFILL

    def is_decoding(self, sequence_id: int) -> bool:
        return self.get_phase(sequence_id) is SequencePhase.DECODE

    def set_phase(self, sequence_id: int, phase: SequencePhase) -> None:
        """Check that the sequence is in this phase; only progress changes a phase."""
        actual = self.get_phase(sequence_id)
        if actual is not phase:
            raise PhaseError(
                f"{self._find(sequence_id)} cannot be set to {phase.value}: by its progress it is in {actual.value}"
            )

    def transition_to_decode(self, sequence_id: int) -> None:
        """Check the boundary between the phases: raises `PhaseError` unless the whole prompt is computed."""
        sequence = self._find(sequence_id)
        if sequence.phase is SequencePhase.COMPLETE:
            raise PhaseError(f"{sequence} has ended and cannot decode")
        missing = sequence.num_prompt - sequence.num_scheduled
        if missing > 0:
            raise PhaseError(f"{sequence} cannot decode: {missing} tokens of its prompt are not computed yet")

    def _find(self, sequence_id: int) -> Sequence:
        if whole("a sequence id", sequence_id, least=None, error=UnknownSequenceError) not in self._sequences:
            raise UnknownSequenceError(f"no sequence {sequence_id} is tracked")
        return self._sequences[sequence_id]

    # -- planning ---------------------------------------------------------------------------------------------
    def plan(
        self,
        slots: Sequences[BatchSlot],
        token_budget: int,
        drafts: Mapping[int, int] | None = None,
        *,
        may_preempt: bool = True,
    ) -> StepPlan:
        """Decide which tokens run next and reserve their blocks; preempt the youngest where blocks run out.

        `drafts` is the number of draft tokens per decoding sequence (by id); drafts never cause a preemption. While a
        step is in flight no sequence can be preempted (`may_preempt=False`): a plan that needs a preemption then leaves
        out the sequences without blocks and sets `StepPlan.is_short`.
        """
        for count in (token_budget, *(() if drafts is None else drafts.values())):
            if type(count) is not int or count < 0:
                whole("a number of tokens", count, error=PhaseError)
        preempted: list[Sequence] = []
        active, decoding, waiting = _sorted_by_phase(slots)
        running = self._reserve_decodes(active, decoding[:token_budget], preempted, may_preempt)
        if running is None:
            return StepPlan(is_short=True)
        decodes, is_uniform = (self._with_drafts(running, token_budget, drafts), False) if drafts else _decodes(running)
        left = token_budget - (sum(item.num_new for item in decodes) if drafts else len(decodes))
        prefills, is_short = (
            self._plan_prefills(active, waiting, left, preempted, may_preempt) if waiting and left > 0 else ([], False)
        )
        if preempted:
            victims = {id(member) for victim in preempted for member in team(victim)}
            decodes = [item for item in decodes if id(item.sequence) not in victims]
            prefills = [item for item in prefills if id(item.sequence) not in victims]
        return StepPlan(tuple(decodes), tuple(prefills), tuple(preempted), is_short=is_short, is_uniform=is_uniform)

    def _reserve_decodes(
        self, active: list[BatchSlot], running: list[BatchSlot], preempted: list[Sequence], may_preempt: bool
    ) -> list[BatchSlot] | None:
        """Reserve one token of each; the slots left after preemptions, None if one is needed but not allowed."""
        while running and not self.decode.reserve([slot.sequence.id for slot in running if slot.sequence is not None]):
            if self._drop_kept():
                continue
            if not may_preempt:
                return None
            victim = max((slot.held for slot in active if slot.sequence is not None), key=lambda s: s.order)
            self._evict(victim, preempted)
            active[:] = [slot for slot in active if slot.sequence is not None]
            running = [slot for slot in running if slot.sequence is not None]
        return running

    def _with_drafts(
        self, running: list[BatchSlot], token_budget: int, drafts: Mapping[int, int]
    ) -> list[ScheduledSequence]:
        """Decodes with draft tokens, as far as the budget and the free blocks allow."""
        spare = token_budget - len(running)
        scheduled = []
        for slot in running:
            sequence = slot.held
            start = sequence.num_scheduled
            count = min(drafts.get(sequence.id, 0), spare)
            if count and self._reserve_drafts(sequence.id, start + 1, count):
                spare -= count
            else:
                count = 0
            scheduled.append(ScheduledSequence(slot.index, sequence, start, 1 + count, (slot.index,)))
        return scheduled

    def _reserve_drafts(self, sequence_id: int, length: int, count: int) -> bool:
        if self._speculation is None:
            raise PhaseError("draft tokens are planned and no SpeculativeDecodingSharing is configured")
        try:
            self._speculation.allocate_speculative_blocks(sequence_id, length, count)
        except OutOfBlocksError:
            return False
        return True

    def _plan_prefills(
        self,
        active: list[BatchSlot],
        waiting: list[BatchSlot],
        budget: int,
        preempted: list[Sequence],
        may_preempt: bool,
    ) -> tuple[list[ScheduledSequence], bool]:
        """Chunks in order of priority and arrival, and whether a chunk waits for a preemption."""
        scheduled: list[ScheduledSequence] = []
        refused: list[Sequence] = []  # no blocks for these: sequences that come after them in order wait as well
        for slot, quota in prefill_quotas([slot for slot in waiting if slot.sequence is not None], budget):
            if budget < 1:
                break
            if slot.sequence is None or not self._has_table(slot.held):  # preempted in this step, or not yet opened
                continue
            sequence = slot.held
            if any(sequence.order >= other.order for other in refused):
                continue
            limit = min(self.chunk_size, budget, quota, _chunk_limit(sequence))
            if limit < 1:
                continue
            if sequence.request.images:
                limit = whole_images(sequence.request.images, sequence.num_scheduled, limit)
            num_new = self.prefill.reserve_chunk(sequence, limit)
            while num_new == 0 and self._make_room(sequence, active, preempted, may_preempt):
                num_new = self.prefill.reserve_chunk(sequence, limit)
            if num_new == 0:
                refused.append(sequence)
                continue
            budget -= num_new
            start = sequence.num_scheduled
            samples = slot.sample_slots if start + num_new == sequence.num_tokens else ()
            scheduled.append(ScheduledSequence(slot.index, sequence, start, num_new, samples))
        return scheduled, not may_preempt and any(_behind(sequence, active) for sequence in refused)

    def _has_table(self, sequence: Sequence) -> bool:
        """Open the table of a preempted group's member; members resume one by one and share cached blocks."""
        blocks = self.prefill.blocks
        if blocks.has_table(sequence.id):
            return True
        if sequence.group is None or not sequence.group.may_open(sequence):
            return False
        relative, shared = _nearest(sequence)
        if relative is not None and shared:  # also without a prefix cache: admission counted the shared blocks once
            blocks.fork(relative.id, sequence.id)
            blocks.truncate(sequence.id, shared)
            sequence.rewind(blocks.num_tokens_of(sequence.id))  # fewer, where a recurrent state is missing
        else:
            request = sequence.request
            cached = blocks.open_table(sequence.id, sequence.token_ids, salt=request.cache_salt, marks=request.marks)
            sequence.rewind(cached)
        return True

    def _make_room(
        self, sequence: Sequence, active: Iterable[BatchSlot], preempted: list[Sequence], may_preempt: bool
    ) -> bool:
        """Preempt one sequence that comes after this one in order; False when there is none."""
        if self._drop_kept():
            return True
        behind = _behind(sequence, active)
        if not behind or not may_preempt:
            return False
        self._evict(max(behind, key=lambda s: s.order), preempted)
        return True

    def _evict(self, victim: Sequence, preempted: list[Sequence]) -> None:
        if self._preempt is None:
            raise PhaseError("no block is free and no preempt callback is configured")
        self._preempt(victim)
        preempted.append(victim)


def _nearest(sequence: Sequence) -> tuple[Sequence | None, int]:
    """The member of the group with the longest computed beginning in common with this one, and its length."""
    best, longest = None, 0
    for other in [] if sequence.group is None else sequence.group.live():
        if other is sequence or other.num_computed <= longest:
            continue
        most = min(other.num_computed, sequence.num_tokens - 1)
        pairs = zip(other.token_ids[:most], sequence.token_ids[:most], strict=False)
        shared = next((count for count, (left, right) in enumerate(pairs) if left != right), most)
        if shared > longest:
            best, longest = other, shared
    return best, longest


def _behind(sequence: Sequence, active: Iterable[BatchSlot]) -> list[Sequence]:
    """Running sequences that come after this one in order."""
    return [slot.held for slot in active if slot.sequence is not None and slot.held.order > sequence.order]


def _decodes(running: list[BatchSlot]) -> tuple[list[ScheduledSequence], bool]:
    """(One token of each slot's sequence, whether none of them has a group)."""
    scheduled, is_uniform, new = [], True, ScheduledSequence._make  # faster than the constructor
    for slot in running:
        sequence = slot.sequence
        if sequence is not None:
            start = sequence.num_computed + sequence.num_in_flight
            scheduled.append(new((slot.index, sequence, start, 1, slot.alone, ())))
            if sequence.group is not None:
                is_uniform = False
    return scheduled, is_uniform


def _sorted_by_phase(
    slots: Sequences[BatchSlot],
) -> tuple[list[BatchSlot], list[BatchSlot], list[BatchSlot]]:
    """(running slots, slots that can decode now, slots with a prompt to compute), in one pass over the slots.

    A sequence with a token in flight keeps decoding, unless that token is its last or its next draw depends on it.
    """
    active, decoding, waiting = [], [], []
    for slot in slots:
        sequence = slot.sequence
        if sequence is None or sequence.parent is not None:
            continue
        group = sequence.group
        if group is not None and not group.is_live(sequence):
            continue
        active.append(slot)
        expected = sequence.num_expected
        if expected and (
            slot.waits_for_tokens or len(sequence.output_token_ids) + expected >= sequence.request.max_tokens
        ):
            continue
        scheduled = sequence.num_computed + sequence.num_in_flight
        if sequence.finish_reason is not None:
            continue
        if (
            scheduled < sequence.num_prompt
            or len(sequence.token_ids) + expected - scheduled > 1  # `Sequence.phase`
            or len(slot.sample_slots) > 1  # its other completions fork with its first draw
        ):
            waiting.append(slot)
        elif group is None or group.is_ready():
            decoding.append(slot)
    return active, decoding, waiting


def _chunk_limit(sequence: Sequence) -> int:
    """Tokens left to prefill; resumed members of a group leave the last one for their common decode step."""
    together = sequence.group is not None and bool(sequence.output_token_ids)
    return sequence.num_uncomputed - 1 if together else sequence.num_uncomputed
