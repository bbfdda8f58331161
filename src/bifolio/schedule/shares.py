"""Slots and prefill are shared between owners: a client with many requests does not delay those of other clients.

An owner is the key of a client; requests without an owner never yield. A request that has waited for `PATIENCE` seconds
takes the slot of the youngest sequence of the owner with the most slots, if that owner has at least two more. The
sequence is preempted, as for want of blocks: it continues later where it was, and its output is the same. Prompts of
several owners are computed side by side, a part of each in every step.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from bifolio.sequence import Sequence, team

if TYPE_CHECKING:
    from bifolio.schedule.batcher import ContinuousBatcher
    from bifolio.schedule.plan import BatchSlot

PATIENCE = 0.25  # seconds that a request waits before another owner yields
LONGEST_SLICE = 5.0  # seconds after which a sequence yields even if it has sampled no token since it was admitted
INTERVAL = 0.05  # seconds between two looks at the queue


def prefill_quotas(slots: list[BatchSlot], budget: int) -> list[tuple[BatchSlot, int]]:
    """Slots in the order of their prompts, each with the most tokens that it may compute in a step of `budget` tokens.

    The first prompt of every owner gets an equal part; a part that is not needed goes to the longer prompts.
    """
    ordered = sorted(slots, key=lambda slot: slot.held.order)
    firsts: dict[str, BatchSlot] = {}
    for slot in ordered:
        firsts.setdefault(slot.held.request.owner, slot)
    if len(firsts) < 2:
        return [(slot, budget) for slot in ordered]
    left, quotas = budget, []
    by_length = sorted(firsts.values(), key=lambda slot: (slot.held.num_uncomputed, slot.held.order))
    for number, slot in enumerate(by_length):
        quota = min(slot.held.num_uncomputed, max(left // (len(by_length) - number), 1))
        quotas.append((slot, quota))
        left -= quota
    chosen = {slot.index for slot, _ in quotas}
    return [*quotas, *((slot, budget) for slot in ordered if slot.index not in chosen)]


class SlotShares:
    """Decides who yields. `admitted` and `queued` keep the times of the batcher's sequences."""

    def __init__(self) -> None:
        self._queued: dict[int, float] = {}  # sequence id -> when it was queued
        self._admitted: dict[int, tuple[float, int]] = {}  # sequence id -> when, and its tokens then
        self._next_look = 0.0

    def queued(self, sequence: Sequence) -> None:
        self._queued[sequence.id] = time.monotonic()

    def admitted(self, sequence: Sequence) -> None:
        self._queued.pop(sequence.id, None)
        self._admitted[sequence.id] = (time.monotonic(), sequence.num_tokens)

    def left(self, sequence: Sequence) -> None:
        self._queued.pop(sequence.id, None)
        self._admitted.pop(sequence.id, None)

    def overdue(self, batcher: ContinuousBatcher) -> Sequence | None:
        """The first sequence that has waited too long while another owner has slots to yield."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + INTERVAL
        counts = Counter(slot.held.request.owner for slot in batcher.active_slots())
        most = max((count for owner, count in counts.items() if owner), default=0)
        for sequence in batcher.waiting_in_order() if most > 1 else ():
            owner = sequence.request.owner
            if owner and counts[owner] + 1 < most and now - self._queued.get(sequence.id, now) > PATIENCE:
                return sequence
        return None

    def yield_to(self, sequence: Sequence, batcher: ContinuousBatcher) -> list[Sequence]:
        """Preempt until the sequence can be admitted, and admit it; the preempted sequences."""
        now = time.monotonic()
        preempted: list[Sequence] = []
        counts = Counter(slot.held.request.owner for slot in batcher.active_slots())
        heaviest = max((owner for owner in counts if owner), key=lambda owner: counts[owner], default="")
        while not batcher.admit_now(sequence):
            candidates = [
                slot.held
                for slot in batcher.active_slots()
                if slot.held.request.owner == heaviest and not slot.held.is_dormant and self._may_yield(slot.held, now)
            ]
            if not candidates:
                break
            victim = max(candidates, key=lambda candidate: (candidate.order, candidate.index))
            batcher.preempt(victim)
            preempted.append(victim)
        return preempted

    def _may_yield(self, sequence: Sequence, now: float) -> bool:
        """Whether it has got on since it was admitted, so that turns of preemptions cannot stop it for ever."""
        return all(self._got_on(member, now) for member in team(sequence) if not member.is_dormant)

    def _got_on(self, sequence: Sequence, now: float) -> bool:
        since, num_tokens = self._admitted.get(sequence.id, (now, sequence.num_tokens))
        return sequence.num_tokens > num_tokens or now - since > LONGEST_SLICE
