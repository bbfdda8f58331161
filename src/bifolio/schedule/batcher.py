"""`ContinuousBatcher`: the queue and the slots. Requests join and leave between any two steps."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from typing import Protocol

from bifolio.adapter_salt import digest_of_adapter
from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.counts import whole
from bifolio.errors import ConfigError, RequestError
from bifolio.schedule.plan import BatchSlot
from bifolio.schedule.read_prompts import ReadPrompts
from bifolio.schedule.shares import SlotShares
from bifolio.sequence import FinishReason, Request, Sequence, StepResult, team

KEPT_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class SlotListener(Protocol):
    """Callbacks for state that is kept by slot."""

    def slot_taken(self, slot: int, sequence: Sequence) -> None: ...

    def slot_freed(self, slot: int, sequence: Sequence) -> None: ...


class PrefixSource(Protocol):
    """Tiers below the cache, which are asked before a sequence is admitted."""

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether blocks of its prefix are on their way into the cache."""
        ...


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
        self.max_slots = whole("max_slots", max_slots, least=1, error=ConfigError)
        self.max_waiting = None if max_waiting is None else whole("max_waiting", max_waiting, error=ConfigError)
        self.num_prompt_tokens = 0  # of all admitted requests
        self.num_cached_tokens = 0  # of those, found in the prefix cache
        self.slots = [BatchSlot(index) for index in range(max_slots)]
        self._blocks = blocks
        self._listener = listener
        self._max_running: int | None = None
        self._may_admit = True  # blocks or slots were freed since the last attempt that admitted no request
        self._free = list(range(max_slots - 1, -1, -1))  # slot numbers; the smallest is taken first
        self._waiting: list[tuple[tuple[int, float, int], int, Sequence]] = []  # heap by order, then by index
        self._waiting_ids: set[int] = set()  # of the sequences in the heap
        self._slot_of: dict[int, int] = {}  # sequence id → slot number
        self._kept: dict[str, Sequence] = {}  # ended conversations that may be branched; the oldest first
        self.source: PrefixSource | None = None  # of blocks that are not in the cache
        self._shares: SlotShares | None = None  # made with the first request that has an owner

    # -- queries ------------------------------------------------------------------------------------------------
    @property
    def num_waiting(self) -> int:
        return sum(1 for _, _, sequence in self._waiting if sequence.finish_reason is None)

    @property
    def num_running(self) -> int:
        return len(self._slot_of)

    @property
    def has_work(self) -> bool:
        return bool(self._slot_of) or self.num_waiting > 0

    @property
    def max_running(self) -> int | None:
        """Limit on running sequences after an out-of-memory error; a single request may always run."""
        return self._max_running

    @max_running.setter
    def max_running(self, count: int | None) -> None:
        if count is not None:
            whole("max_running", count, least=1, error=ConfigError)
        self._max_running, self._may_admit = count, True

    def active_slots(self) -> list[BatchSlot]:
        return [slot for slot in self.slots if slot.sequence is not None]

    def slot_of(self, sequence: Sequence) -> int | None:
        return self._slot_of.get(sequence.id)

    # -- one iteration --------------------------------------------------------------------------------------------
    def step(self, run_iteration: Callable[[list[BatchSlot]], list[StepResult]]) -> list[StepResult]:
        """One iteration over all active slots: admit, run, evict."""
        self.evict_completed()  # sequences that ended between two steps
        self.admit_pending()
        results = run_iteration(self.active_slots())
        self.evict_completed()
        return results

    # -- admission ----------------------------------------------------------------------------------------------
    def add(self, request: Request) -> None:
        """Queue a request; its sequences after the first are forked from the first later."""
        self._check_new(request)
        if len(request.sequences) > self.max_slots:
            raise RequestError(
                f"the request has {len(request.sequences)} sequences and the engine runs at most "
                f"{self.max_slots}: request fewer, or start the engine with max_num_seqs >= {len(request.sequences)}"
            )
        if self.max_waiting is not None and self.num_waiting >= self.max_waiting:
            raise RequestError(f"{self.num_waiting} requests are waiting already: try again later")
        if request.owner and self._shares is None:
            self._shares = SlotShares()
        self._push(request.sequences[0])

    def _check_new(self, request: Request) -> None:
        if not request.sequences:
            raise RequestError(f"the request {request.request_id!r} has no sequences: add its completions first")
        for sequence in request.sequences:
            if sequence.id in self._waiting_ids or sequence.id in self._slot_of or sequence.finish_reason is not None:
                raise RequestError(f"the request {request.request_id!r} waits, runs or has ended: add it once")

    def overdue(self) -> Sequence | None:
        """A sequence that waits while another owner has slots to yield."""
        return None if self._shares is None or not self._waiting else self._shares.overdue(self)

    def yield_to(self, sequence: Sequence) -> list[Sequence]:
        """Preempt sequences of the owner with the most slots for one that waits; no step may be in flight."""
        return [] if self._shares is None else self._shares.yield_to(sequence, self)

    def waiting_in_order(self) -> list[Sequence]:
        return [item[2] for item in sorted(self._waiting) if item[2].finish_reason is None]

    def admit_now(self, sequence: Sequence) -> bool:
        """Admit a waiting sequence before its turn; False if slots or blocks are missing."""
        if sequence.id not in self._waiting_ids:
            raise RequestError(f"{sequence} does not wait: add its request first")
        reading = ReadPrompts([slot.held for slot in self.slots if slot.sequence is not None], self._blocks)
        if not self._fits(sequence, reading):
            return False
        self._waiting = [item for item in self._waiting if item[2] is not sequence]
        heapq.heapify(self._waiting)
        self._waiting_ids.discard(sequence.id)
        self._admit(sequence)
        return True

    def prompts_advanced(self) -> None:
        """Retry admission after prefill: waiting requests may share the new blocks."""
        self._may_admit = True

    def admit_pending(self) -> list[Sequence]:
        """Assign free slots to waiting sequences, by priority and arrival, as long as blocks for them are free."""
        admitted: list[Sequence] = []
        if not self._waiting or not self._may_admit:
            return admitted
        self._may_admit = False
        reading = ReadPrompts([slot.held for slot in self.slots if slot.sequence is not None], self._blocks)
        passed = []  # sequences that wait for a prefix; others may overtake them
        try:
            while self._waiting:
                sequence = self._waiting[0][2]
                if sequence.finish_reason is None:
                    if reading.will_know_prefix(sequence):
                        if not sequence.request.owner:
                            break
                        passed.append(heapq.heappop(self._waiting))
                        continue
                    if self._is_fetched(sequence):
                        passed.append(heapq.heappop(self._waiting))
                        continue
                    if not self._fits(sequence, reading):
                        break
                heapq.heappop(self._waiting)  # before it takes slots: after an error there it runs and does not wait
                self._waiting_ids.discard(sequence.id)
                if sequence.finish_reason is None:
                    self._admit(sequence)
                    admitted.append(sequence)
        finally:
            for item in passed:
                heapq.heappush(self._waiting, item)
        return admitted

    def _is_fetched(self, sequence: Sequence) -> bool:
        """Whether blocks for a sequence that would have a slot are on their way."""
        return self.source is not None and len(self._free) >= len(team(sequence)) and self.source.must_wait(sequence)

    def _fits(self, sequence: Sequence, reading: ReadPrompts) -> bool:
        """Whether there are slots and blocks for it; its table is open then."""
        count = len(team(sequence))
        return len(self._free) >= count and not self._is_too_many(count) and self._open(sequence, reading)

    def _admit(self, sequence: Sequence) -> None:
        """Give it and its later forks their slots."""
        slots = [self._take_slot(member) for member in team(sequence)]
        if sequence.group is None:
            self.slots[slots[0]].sample_slots = tuple(slots)
        if not sequence.request.metrics.num_preemptions:  # a preempted sequence was counted before
            self.num_prompt_tokens += sequence.num_prompt
            self.num_cached_tokens += sequence.request.metrics.num_cached_tokens

    def _is_too_many(self, count: int) -> bool:
        limit = self._max_running
        return limit is not None and bool(self._slot_of) and len(self._slot_of) + count > limit

    def _open(self, sequence: Sequence, reading: ReadPrompts) -> bool:
        """Open its table on the cached prefix if the remaining tokens fit beside the running sequences."""
        request = sequence.request
        branched = self._blocks.has_table(sequence.id)  # forked from a kept conversation before it was admitted
        if branched:
            cached = self._blocks.resume(sequence.id)
        else:
            cached = self._blocks.open_table(
                sequence.id,
                sequence.token_ids,
                salt=request.cache_salt,
                marks=request.marks,
                max_cached=request.most_cached if not sequence.output_token_ids else None,
            )
        needed = reading.blocks_with(sequence, cached)
        while self._slot_of and needed + len(self._slot_of) // 4 > self._blocks.num_free_blocks:
            if not self._drop_oldest(but=sequence):
                if branched:
                    self._blocks.rest(sequence.id)
                else:
                    self._blocks.release(sequence.id)
                return False
        sequence.rewind(cached)
        reading.add(sequence, needed)
        if not request.metrics.first_scheduled:
            request.metrics.first_scheduled = time.perf_counter()
            request.metrics.num_cached_tokens = cached
        return True

    # -- eviction -------------------------------------------------------------------------------------------------
    def evict_completed(self) -> list[Sequence]:
        """Free the slots and blocks of finished sequences."""
        slots, ended = self.slots, []
        for index in self._slot_of.values():
            sequence = slots[index].sequence
            if sequence is not None and sequence.finish_reason is not None:
                ended.append(sequence)
        for sequence in ended:
            if sequence.request.keep and sequence.finish_reason in KEPT_ENDS and sequence.group is None:
                self._kept.setdefault(sequence.request.request_id, sequence)  # of several samples, the first to end
            self._leave(sequence, keep_blocks=sequence in self._kept.values())
        return ended

    def drop_kept(self, request_id: str | None = None) -> bool:
        """Release the blocks of a kept conversation, by default the oldest; False when there is none.

        Without a kept conversation, the last waiting branch of one gives up its blocks: it is computed anew later.
        """
        if request_id is None:
            return self._drop_oldest()
        sequence = self._kept.pop(request_id, None)
        return sequence is not None and self._drop(sequence)

    def _drop_oldest(self, but: Sequence | None = None) -> bool:
        if self._kept:
            return self._drop(self._kept.pop(next(iter(self._kept))))
        branches = [item for item in self._waiting if item[2] is not but and self._blocks.has_table(item[2].id)]
        return bool(branches) and self._drop(max(branches)[2])

    def _drop(self, sequence: Sequence) -> bool:
        self._blocks.release(sequence.id)
        self._may_admit = True
        return True

    def kept(self, request_id: str) -> Sequence | None:
        """A kept conversation, which becomes the newest of them."""
        sequence = self._kept.pop(request_id, None)
        if sequence is not None:
            self._kept[request_id] = sequence
        return sequence

    def preempt(self, sequence: Sequence) -> None:
        """Release blocks and slot; the sequence is queued again and recomputed later, mostly from cached blocks."""
        members = team(sequence)
        if sequence.id not in self._slot_of:
            raise RequestError(f"{sequence} holds no slot: it cannot be preempted")
        for member in members:
            self._leave(member)
            member.rewind(0)
        sequence.request.metrics.num_preemptions += 1
        live = members if sequence.group is None else sequence.group.live()  # the first of these computes the prompt
        self._push(next(member for member in live if not member.is_dormant))

    def fork(self, parent: Sequence, child: Sequence, num_in_flight: int | None = None) -> None:
        """Share the parent's blocks and progress with the child, which already has a slot (`Sequence.fork_from`)."""
        if parent.id not in self._slot_of or child.id not in self._slot_of:
            raise RequestError(f"{parent} and its fork need a slot each: admit them first")
        self._blocks.fork(parent.id, child.id)
        child.fork_from(parent, num_in_flight)
        parent_slot = self._slot_of[parent.id]
        self.slots[parent_slot].sample_slots = (parent_slot,)
        child_slot = self._slot_of[child.id]
        self.slots[child_slot].sample_slots = (child_slot,)

    def finish(
        self, request: Request, reason: FinishReason, sequences: list[Sequence] | None = None
    ) -> list[StepResult]:
        """Finish a request's sequences, by default all; the next `evict_completed` frees their slots and blocks."""
        results = []
        for sequence in request.sequences if sequences is None else sequences:
            if sequence.finish_reason is None:
                sequence.finish(reason)
                if sequence.id not in self._slot_of and self._blocks.has_table(sequence.id):
                    self._blocks.release(sequence.id)  # branched from a kept conversation and never admitted
                results.append(StepResult(request.request_id, None, True, reason, sequence.index, sequence=sequence))
        if request.is_finished:
            request.metrics.finished = time.perf_counter()
        return results

    # -- slots ----------------------------------------------------------------------------------------------------
    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.order, sequence.index, sequence))
        self._waiting_ids.add(sequence.id)
        self._may_admit = True
        if self._shares is not None:
            self._shares.queued(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence that has neither blocks nor slot."""
        if sequence.id in self._waiting_ids or sequence.id in self._slot_of:
            raise RequestError(f"{sequence} waits or runs already: queue it once")
        self._push(sequence)

    def take_waiting(self) -> list[Sequence]:
        """Empty the queue; the caller queues the sequences that may run again with `wait`."""
        taken = [sequence for _, _, sequence in self._waiting if sequence.finish_reason is None]
        self._waiting.clear()
        self._waiting_ids.clear()
        return taken

    def _take_slot(self, sequence: Sequence) -> int:
        index = self._free.pop()
        self.slots[index].sequence = sequence
        self.slots[index].sample_slots = (index,)
        self._slot_of[sequence.id] = index
        if self._shares is not None:
            self._shares.admitted(sequence)
        if self._listener is not None:
            self._listener.slot_taken(index, sequence)
        return index

    def _leave(self, sequence: Sequence, keep_blocks: bool = False) -> None:
        self._may_admit = True
        if self._shares is not None:
            self._shares.left(sequence)
        index = self._slot_of.pop(sequence.id, None)
        if index is not None:
            self.slots[index].sequence = None
            self.slots[index].sample_slots = ()
            self._free.append(index)
            self._free.sort(reverse=True)
            if self._listener is not None:
                self._listener.slot_freed(index, sequence)
        if not self._blocks.has_table(sequence.id):
            return
        request, hint = sequence.request, sequence.request.session
        if hint is not None and sequence.finish_reason is not None and sequence.index == 0:
            self._blocks.protect(
                sequence.id, request.owner, hint, sequence.token_ids, request.salt,
                digest_of_adapter(request.adapter), request.images,
            )  # fmt: skip
        if keep_blocks:
            self._blocks.rest(sequence.id)
        else:
            self._blocks.release(sequence.id)
