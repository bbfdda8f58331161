"""`ContinuousBatcher`: who waits, who holds which row. Requests join and leave between any two steps."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Protocol

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.errors import RequestError
from bifolio.schedule.phases import team
from bifolio.schedule.slot import BatchSlot
from bifolio.sequence import FinishReason, Request, Sequence, StepResult

KEPT_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class SlotListener(Protocol):
    """Told when a row changes hands, to keep what it stores by row in step."""

    def slot_taken(self, slot: int, sequence: Sequence) -> None: ...

    def slot_freed(self, slot: int, sequence: Sequence) -> None: ...


class ReadPrompts:
    """The prompts that are being read: blocks that are spoken for, and prefixes that will be known.

    Made once for all who are admitted between two steps, and kept up: looking at everybody for everybody would take
    longer than the step when hundreds come at once.
    """

    def __init__(self, running: list[Sequence], blocks: KVCacheBlockManager) -> None:
        self._blocks = blocks
        self._tokens: list[tuple[int, int]] = []  # (sequence id, tokens whose slots are not reserved yet)
        self._prefixes: dict[tuple[bytes, int, int], list[list[int]]] = {}  # by salt, number of tokens, last token
        self._ends: set[int] = set()  # those numbers
        for sequence in running:
            self._note(sequence)
        self._num_blocks = blocks.blocks_needed(self._tokens)

    def _note(self, sequence: Sequence) -> None:
        blocks, size = self._blocks, self._blocks.block_size
        if sequence.num_uncomputed > 1 and blocks.has_row(sequence.id):
            self._tokens.append((sequence.id, sequence.num_tokens - blocks.row_num_tokens(sequence.id)))
        if not sequence.is_dormant and sequence.num_uncomputed > size:
            end = sequence.num_computed // size * size + size  # the next block that it will complete
            self._ends.add(end)
            key = sequence.request.salt, end, sequence.token_ids[end - 1]
            self._prefixes.setdefault(key, []).append(sequence.token_ids)

    def will_know_prefix(self, sequence: Sequence) -> bool:
        """Somebody is computing a prefix that this one needs as well: wait a few steps instead of doing it again."""
        request, tokens, count = sequence.request, sequence.token_ids, sequence.num_tokens
        if not self._blocks.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return False
        return any(
            other[:end] == tokens[:end]
            for end in self._ends
            if end < count
            for other in self._prefixes.get((request.salt, end, tokens[end - 1]), ())
        )

    def blocks_with(self, sequence: Sequence, cached: int) -> int:
        """Blocks that these prompts and the rest of this one take together; its row is open."""
        own = (sequence.id, sequence.num_tokens - cached)
        if cached % self._blocks.block_size:  # a tail that others may share: copies depend on all of them
            return self._blocks.blocks_needed([*self._tokens, own])
        return self._num_blocks + self._blocks.blocks_needed([own])

    def add(self, sequence: Sequence, num_blocks: int) -> None:
        """It is admitted; `num_blocks` are spoken for now."""
        known = len(self._tokens)
        self._note(sequence)
        if len(self._tokens) > known:
            self._num_blocks = num_blocks


class ContinuousBatcher:
    """A fixed number of permanent slots, and a queue in order of priority and arrival."""

    def __init__(
        self,
        max_slots: int,
        blocks: KVCacheBlockManager,
        *,
        listener: SlotListener | None = None,
        max_waiting: int | None = None,
    ) -> None:
        self.max_slots = max_slots
        self.max_waiting = max_waiting
        self.max_running: int | None = None  # fewer than there are slots while memory is short; a request alone may run
        self.slots = [BatchSlot(index) for index in range(max_slots)]
        self._blocks = blocks
        self._listener = listener
        self._free = list(range(max_slots - 1, -1, -1))  # row numbers; the smallest is taken first
        self._waiting: list[tuple[tuple[int, int], int, Sequence]] = []  # heap by order, then by index
        self._slot_of: dict[int, int] = {}  # sequence id → row number
        self._kept: dict[str, Sequence] = {}  # ended conversations that may be branched; the oldest first

    # -- looking ------------------------------------------------------------------------------------------------
    @property
    def num_waiting(self) -> int:
        return sum(1 for _, _, sequence in self._waiting if sequence.finish_reason is None)

    @property
    def num_running(self) -> int:
        return len(self._slot_of)

    @property
    def has_work(self) -> bool:
        return bool(self._slot_of) or self.num_waiting > 0

    def active_slots(self) -> list[BatchSlot]:
        return [slot for slot in self.slots if slot.sequence is not None]

    def slot_of(self, sequence: Sequence) -> int | None:
        return self._slot_of.get(sequence.id)

    # -- joining ------------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request; its sequences beyond the first wait to be forked from it."""
        if len(request.sequences) > self.max_slots:
            raise RequestError(
                f"the request asks for {len(request.sequences)} sequences at once and the engine runs at most "
                f"{self.max_slots}: ask for fewer, or start it with max_num_seqs >= {len(request.sequences)}"
            )
        if self.max_waiting is not None and self.num_waiting >= self.max_waiting:
            raise RequestError(f"{self.num_waiting} requests are waiting already: try again later")
        self._push(request.sequences[0])

    def admit_pending(self) -> list[Sequence]:
        """Give free slots to those who wait, best first, as long as the blocks for their tokens are there."""
        admitted: list[Sequence] = []
        if not self._waiting:
            return admitted
        reading = ReadPrompts([slot.held for slot in self.slots if slot.sequence is not None], self._blocks)
        while self._waiting:
            sequence = self._waiting[0][2]
            if sequence.finish_reason is not None:
                heapq.heappop(self._waiting)
                continue
            members = team(sequence)
            if (
                len(self._free) < len(members)
                or self._is_too_many(len(members))
                or reading.will_know_prefix(sequence)
                or not self._open(sequence, reading)
            ):
                break
            heapq.heappop(self._waiting)
            rows = [self._take_slot(member) for member in members]
            if sequence.group is None:
                self.slots[rows[0]].sample_slots = tuple(rows)
            admitted.append(sequence)
        return admitted

    def _is_too_many(self, count: int) -> bool:
        return self.max_running is not None and bool(self._slot_of) and len(self._slot_of) + count > self.max_running

    def _open(self, sequence: Sequence, reading: ReadPrompts) -> bool:
        """Open its row on the cached prefix if the rest will fit beside those who run."""
        request = sequence.request
        branched = self._blocks.has_row(sequence.id)  # forked from a kept conversation before it was admitted
        if branched:
            cached = self._blocks.row_num_tokens(sequence.id)
        else:
            wants_logits = request.params.prompt_logprobs is not None and not sequence.output_token_ids
            cached = self._blocks.open_row(
                sequence.id, sequence.token_ids, salt=request.salt, max_cached=0 if wants_logits else None
            )
        needed = reading.blocks_with(sequence, cached)
        while self._slot_of and needed + len(self._slot_of) // 4 > self._blocks.num_free_blocks:
            if not self.drop_kept():
                if not branched:
                    self._blocks.release(sequence.id)
                return False
        sequence.num_computed = cached
        reading.add(sequence, needed)
        if not request.metrics.first_scheduled:
            request.metrics.first_scheduled = time.perf_counter()
            request.metrics.num_cached_tokens = cached
        return True

    # -- leaving --------------------------------------------------------------------------------------------------
    def evict_completed(self) -> list[Sequence]:
        """Slots and blocks of sequences that ended go back."""
        ended = [slot.held for slot in self.slots if slot.sequence is not None and slot.held.finish_reason is not None]
        for sequence in ended:
            if sequence.request.keep and sequence.finish_reason in KEPT_ENDS and sequence.group is None:
                self._kept.setdefault(sequence.request.request_id, sequence)  # of several samples, the first to end
            self._leave(sequence, keep_row=sequence in self._kept.values())
        return ended

    def drop_kept(self, request_id: str | None = None) -> bool:
        """Give back the row of a kept conversation, by default the oldest; False when there is none."""
        if request_id is None:
            request_id = next(iter(self._kept), None)
        sequence = None if request_id is None else self._kept.pop(request_id, None)
        if sequence is None:
            return False
        self._blocks.release(sequence.id)
        return True

    def kept(self, request_id: str) -> Sequence | None:
        return self._kept.get(request_id)

    def preempt(self, sequence: Sequence) -> None:
        """Take row and slot away; the sequence waits again and is recomputed later, from what is still cached."""
        members = team(sequence)
        for member in members:
            self._leave(member)
            member.num_computed = member.num_draft_computed = 0
        sequence.request.metrics.num_preemptions += 1
        self._push(next(member for member in members if not member.is_dormant))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child, which has its slot already, takes over everything the parent computed."""
        self._blocks.fork(parent.id, child.id)
        child.num_computed, child.num_draft_computed = parent.num_computed, parent.num_draft_computed
        child.parent = None
        parent_slot = self._slot_of[parent.id]
        self.slots[parent_slot].sample_slots = (parent_slot,)
        child_slot = self._slot_of[child.id]
        self.slots[child_slot].sample_slots = (child_slot,)

    def finish(self, request: Request, reason: FinishReason) -> list[StepResult]:
        """End what has not ended of a request; blocks go back at the next `evict_completed`."""
        results = []
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = reason
                results.append(StepResult(request.request_id, None, True, reason, sequence.index, sequence=sequence))
        request.metrics.finished = time.perf_counter()
        return results

    def step(self, run_iteration: Callable[[list[BatchSlot]], list[StepResult]]) -> list[StepResult]:
        """One iteration over all active slots: admit, run, evict."""
        self.admit_pending()
        results = run_iteration(self.active_slots())
        self.evict_completed()
        return results

    # -- slots ----------------------------------------------------------------------------------------------------
    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.order, sequence.index, sequence))

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence that has neither row nor slot."""
        self._push(sequence)

    def take_waiting(self) -> list[Sequence]:
        """Empty the queue; the caller gives back with `wait` those who shall go on waiting."""
        taken = [sequence for _, _, sequence in self._waiting if sequence.finish_reason is None]
        self._waiting.clear()
        return taken

    def _take_slot(self, sequence: Sequence) -> int:
        index = self._free.pop()
        self.slots[index].sequence = sequence
        self.slots[index].sample_slots = (index,)
        self._slot_of[sequence.id] = index
        if self._listener is not None:
            self._listener.slot_taken(index, sequence)
        return index

    def _leave(self, sequence: Sequence, keep_row: bool = False) -> None:
        index = self._slot_of.pop(sequence.id, None)
        if index is not None:
            self.slots[index].sequence = None
            self.slots[index].sample_slots = ()
            self._free.append(index)
            self._free.sort(reverse=True)
            if self._listener is not None:
                self._listener.slot_freed(index, sequence)
        if not keep_row and self._blocks.has_row(sequence.id):
            self._blocks.release(sequence.id)


def unforked_children(sequence: Sequence) -> list[Sequence]:
    """Sequences of the same request that still wait to be forked from this one."""
    return team(sequence)[1:] if sequence.group is None else []
