"""Greedy draws that run ahead of their grammar: drawn without its mask, and checked when the token is known.

Where the most likely token of all is one that the grammar allows, it is also the most likely of those. Such a slot
needs no mask: its steps run ahead like those of any other slot, and the grammar consumes each token when its step is
collected. A forbidden token is discarded, and so are those that launched passes draw after it. Its position is computed
again and drawn with a mask, when no token of the sequence is in flight:

    step     t            t + 1        t + 2       t + 3               t + 4
    draw     no mask      no mask      sits out    mask                no mask
    token    forbidden    discarded                an allowed one      is checked

Every forbidden token in a row doubles the number of draws with a mask that follow, so a model that does not write the
text of its grammar by itself sits out about every second step. No other slot waits for any of this.
"""

from __future__ import annotations

import time

import numpy as np

from bifolio.kernels.interface import DeviceSlots
from bifolio.kernels.logit_edits import LogitEdits
from bifolio.sampling.grammar_mask import CHEAP_SECONDS, GrammarMask
from bifolio.sampling.table import SamplingTable
from bifolio.sampling_params import SamplingParams
from bifolio.schedule.plan import StepPlan

MOST_MASKED = 8  # draws with a mask after a forbidden token


class UnmaskedDraws:
    """Which slots of one engine are drawn without the masks of their grammars."""

    def __init__(self, table: SamplingTable, device: DeviceSlots | None, is_allowed: bool) -> None:
        num_slots = len(table.temperature)
        self.is_on = np.zeros(num_slots, dtype=np.bool_)  # the next draw of the slot has no mask
        self.may_be_on = np.zeros(num_slots, dtype=np.bool_)  # the slot is greedy, and a mask is its only edit
        self._discards = np.zeros(num_slots, dtype=np.bool_)  # tokens in flight follow a forbidden one
        self._num_forbidden = [0] * num_slots  # in a row
        self._num_masked: dict[int, int] = {}  # draws with a mask until the slot is on, of slots that are off
        self._waiting: set[int] = set()  # slots whose next draw has a mask and needs all tokens before it
        self._changed: set[int] = set()  # slots that began or ceased to wait since `take_changed`
        self._table, self._device, self._is_allowed = table, device, is_allowed

    def set_slot(self, slot: int, params: SamplingParams, edits: LogitEdits | None) -> None:
        """A new sequence holds the slot; its first token is drawn with a mask."""
        self.clear_slot(slot)
        is_simple = edits is not None and edits.is_mask_alone and params.is_greedy
        if self._is_allowed and is_simple and self._mask(slot) is not None:
            self.may_be_on[slot] = True
            self._num_masked[slot] = 1

    def clear_slot(self, slot: int) -> None:
        self.is_on[slot] = self.may_be_on[slot] = self._discards[slot] = False
        self._num_forbidden[slot] = 0
        self._num_masked.pop(slot, None)
        self._waiting.discard(slot)

    def waits(self, slot: int) -> bool:
        """Whether the next draw of the slot needs all tokens before it, although its steps usually run ahead."""
        return slot in self._waiting

    def take_changed(self) -> set[int]:
        """The slots for which `waits` may have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def to_check(self, slots: np.ndarray) -> np.ndarray | None:
        """i64[c]: the draws among these, about to be launched, whose tokens are checked or discarded later."""
        checked = self.is_on[slots] | self._discards[slots]
        return np.flatnonzero(checked) if checked.any() else None

    def launched(self, plan: StepPlan, is_late: bool, others_are_late: bool) -> None:
        """Count the draws with a mask of a launched step, before its sequences count their tokens in flight.

        `is_late`: the draw of the step waits for masks; `others_are_late`: for those of slots that are never on.
        """
        if not self._num_masked:
            return
        for item in plan.scheduled:
            for slot in item.sample_slots:
                if slot in self._num_masked:
                    self._count(slot, bool(item.sequence.num_expected), is_late, others_are_late)

    def _count(self, slot: int, runs_ahead: bool, is_late: bool, others_are_late: bool) -> None:
        if others_are_late:  # it is drawn late with them
            self._wait(slot, False)
        elif runs_ahead:  # it alone would make the steps of all others late
            self._wait(slot, True)
        elif not is_late:
            self._num_masked[slot] -= 1
            mask = self._mask(slot)
            is_ready = self._num_masked[slot] <= 0 and mask is not None and mask.joins  # its grammar is cheap
            self._wait(slot, not is_ready)
            if is_ready:
                self._switch(slot, True)

    def check(self, slot: int, token: int) -> bool:
        """Whether the grammar allows a token that was drawn without its mask; it then consumes the token."""
        mask, began = self._mask(slot), time.thread_time()
        is_allowed = mask is not None and mask.accepts(token)
        is_slow = time.thread_time() - began > CHEAP_SECONDS
        if is_slow and mask is not None:
            mask.suspect()
        self._num_forbidden[slot] = 0 if is_allowed else self._num_forbidden[slot] + 1
        if self.is_on[slot] and (is_slow or not is_allowed):
            self._switch(slot, False)
            self._num_masked[slot] = min(1 << max(self._num_forbidden[slot] - 1, 0), MOST_MASKED)
            self._wait(slot, True)
        return is_allowed

    def discarded(self, slot: int, num_in_flight: int) -> None:
        """A token of the slot was discarded; so will be those of `num_in_flight` further draws."""
        self._discards[slot] = num_in_flight > 0

    def _switch(self, slot: int, is_on: bool) -> None:
        self.is_on[slot] = is_on
        self._num_masked.pop(slot, None)
        if self._device is not None:
            self._device.set_mask(slot, not is_on)

    def _wait(self, slot: int, waits: bool) -> None:
        if waits != (slot in self._waiting):
            self._waiting ^= {slot}
            self._changed.add(slot)

    def _mask(self, slot: int) -> GrammarMask | None:
        state = self._table.states[slot]
        mask = None if state is None else state.mask
        return mask if isinstance(mask, GrammarMask) else None
