"""Drafts of a head that reads the target's hidden states: EAGLE-3 and multi-token prediction.

Every pass of the target gives out hidden states (`Batch.taps`). They are kept for each sequence until the head computes
its entries from them, at the next draft:

    target      computed up to ......... i        the token at i + 1 is known
    head        |<- entries ->|<- states ->|      one pass over the states drafts the token at i + 2,
                                                  further passes over its own hidden states draft those after it

The head never runs for a sequence that is not drafted for. States of rejected drafts are dropped; entries that the head
computed from its own hidden states are computed again from those of the target.

On a device that verifies drafts itself (`DeviceSlots.verify`) the head follows in the same step: it reads the states of
the accepted tokens there and leaves the next drafts there (`Ahead`). The host collects the verified tokens meanwhile,
and launches the next step without having seen the drafts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequences

import numpy as np

from bifolio.arrays import array_namespace
from bifolio.engine.host_batch import ON_DEVICE
from bifolio.engine.slot_state import SlotState
from bifolio.engine.speculative.drafter import Drafter, Offer
from bifolio.engine.speculative.head_runner import HeadRun, HeadRunner
from bifolio.engine.speculative.tracks import LEAST_STATES, STATE_BYTES, Ahead, Track
from bifolio.kernels.interface import Array, AttentionPhase, PendingDrafts
from bifolio.schedule.plan import ScheduledSequence, StepPlan
from bifolio.sequence import Sequence

LATE_STATES = 64  # of a sequence; more are computed in a pass of their own, before the first draft
CAPTURED_STATES = 256  # of all sequences in a pass of the head that a device has captured
RECENT = 2  # launches of drafts whose tokens still lie in host memory


class HiddenDraft(Drafter):
    """A drafter that runs a head for the sequences of a step, batched, one draft token at a time."""

    reads_states = True

    def __init__(self, runner: HeadRunner, slots: SlotState, chunk_size: int) -> None:
        self.runner = runner
        self._is_resting = False  # drafts do not pay off at present
        self._slots = slots
        self._chunk_size = chunk_size
        self._tracks: dict[int, Track] = {}  # by sequence id
        self._in_plan: dict[int, tuple[PendingDrafts, int]] = {}  # drafts of a step in flight and their row, likewise
        self._num_launches = 0  # of drafts on the device
        row_bytes = 4 * runner.weights.states_width
        self._most_states = max(STATE_BYTES // (row_bytes * len(slots.tables)), LEAST_STATES)

    # -- states of the target -----------------------------------------------------------------------------------------
    def absorb(self, plan: StepPlan, states: Array | None, *, is_resting: bool) -> None:
        """Keep the states that a pass of the target returns; without them the sequences' contexts begin anew."""
        self._is_resting = is_resting
        if states is None and self.runner.blocks.is_untouched:
            return
        scale = self.runner.weights.state_scale
        if states is not None and scale != 1.0:
            states = states * scale
        row, size, last = 0, self.runner.blocks.block_size, len(plan.decodes)
        for number, item in enumerate(plan.decodes + plan.prefills):
            start, count = item.start, item.num_new
            self._settle(item.sequence, start)
            if item.sequence.group is None:
                # Within a block, a decode follows entries of the same tokens.
                if number >= last or start % size == 0 or start % size + count > size:
                    self.runner.blocks.overwritten(self._slots.tables[item.slot], start, start + count)
                if states is not None:
                    self._add(item, states if len(states) == count else states[row : row + count])
            row += count

    def _add(self, item: ScheduledSequence, states: Array) -> None:
        start = item.start
        track = self._tracks.get(item.sequence.id)
        if track is not None:
            track.ahead = None  # its drafts do not follow this pass
        if track is not None and track.start + track.count > start:
            track.cut(start)
        elif track is not None and 0 < start - track.end <= self.runner.blocks.block_size:  # a few plain steps
            track.add(_zeros(states, start - track.end))
        if track is None or track.start + track.count != start:
            track = self._tracks[item.sequence.id] = self._new_track(item, states)
        track.states.append(states)
        track.count += item.num_new
        if track.count > self._most_states:
            if self._is_resting:
                self._drop(track)
            else:
                self._compute(item, track, track.count - 1)

    def _new_track(self, item: ScheduledSequence, states: Array) -> Track:
        """The entries that other sequences left in shared blocks; states of a few missing positions count as zeros."""
        start, end = self.runner.blocks.context(self._slots.tables[item.slot], item.start)
        track = Track(start, end)
        if end < item.start:
            track.add(_zeros(states, item.start - end))
        return track

    def _drop(self, track: Track) -> None:
        """Drop the older half of the states: the context begins anew behind them, at the start of a block."""
        size = self.runner.blocks.block_size
        end = -(-(track.start + track.count // 2) // size) * size
        track.take(min(end - track.start, track.count))
        track.context_start = track.start

    def forked(self, parent: Sequence, child: Sequence) -> None:
        track = self._tracks.get(parent.id)
        if track is not None:
            self._tracks[child.id] = track.copy()

    def warm_up(self, longest: int) -> None:
        if self.runner.on_device is not None:
            self.runner.on_device.warm_up(longest)

    def forget(self, sequence: Sequence) -> None:
        self._tracks.pop(sequence.id, None)
        self._in_plan.pop(sequence.id, None)

    # -- drafts -------------------------------------------------------------------------------------------------------
    def offers(self, sequences: list[Sequence], length: int) -> dict[int, Offer]:
        """Offer drafts for sequences whose last state is known."""
        offers = {}
        for sequence in sequences:
            track = self._tracks.get(sequence.id)
            if track is None:
                continue
            track.cut(sequence.num_tokens - 1)
            self._settle(sequence, sequence.num_tokens - 1)
            ahead = self._ahead(sequence)
            if ahead is not None:
                offers[sequence.id] = Offer(min(length, ahead.length), 0)
            elif track.count and track.end == sequence.num_tokens - 1:
                offers[sequence.id] = Offer(length, 0, max(track.count - length - 1, 0))
        return offers

    def fill(self, items: Sequences[ScheduledSequence], *, on_device: bool = False) -> list[tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        late = []
        for item in items:
            ahead = self._ahead(item.sequence)
            if ahead is None or ahead.length < item.num_new - 1:
                late.append(item)
            else:
                found[item.slot] = self._taken(item, ahead.pending, ahead.row, on_device)
        if late:
            tokens = self._draft(late, on_device)
            found |= {item.slot: guess for item, guess in zip(late, tokens, strict=True)}
        return [found[item.slot] for item in items]

    def _draft(self, items: Sequences[ScheduledSequence], on_device: bool) -> list[tuple[int, ...]]:
        """Drafts from states that are kept, in one launch where the device draws them."""
        started = time.perf_counter()
        runs, given = self._first_runs(items)
        slots = [item.slot for item in items]
        if self._slots.draws_drafts(slots):
            positions, lengths = [item.sequence.num_tokens for item in items], [item.num_new - 1 for item in items]
            pending = self.runner.draft(runs, given, slots, positions, lengths)
            if pending is not None:
                self._num_launches += 1
                self._computed(runs)
                drafts = [self._taken(item, pending, row, on_device) for row, item in enumerate(items)]
                if not on_device:
                    self.measured(sum(len(run.tokens) for run in runs), time.perf_counter() - started)
                return drafts
        return self._fill_by_passes(items, runs, given)

    # -- drafts on a device, ahead of the host -------------------------------------------------------------------------
    @property
    def can_follow(self) -> bool:
        return self.runner.on_device is not None

    def follow(self, plan: StepPlan, length: int) -> None:
        """Draft after a verification on the device; entries of tokens that it rejects are computed again."""
        runs, followed, states, length = [], [], [], min(length, self.runner.most_on_device)
        for row, item in enumerate(plan.decodes):
            self._settle(item.sequence, item.start)
            track, table = self._tracks.get(item.sequence.id), self._table(item)
            is_read = track is not None and not track.count and track.start == item.start
            self.runner.blocks.overwritten(table, item.start, item.start + item.num_new)
            if track is not None and is_read:
                followed.append((row, item, track))
                first = track.context_start
            else:  # the head has not read the tokens before: it keeps the state, and writes to the padding block
                table, first = table[:0], item.start
                states.append((item, self._slots.verified_states(row) * self.runner.weights.state_scale))
            runs.append(HeadRun(table, first, item.start, [0] * item.num_new, _rope(item.sequence)))
        if followed:
            pending = self.runner.follow(runs, [item.slot for item in plan.decodes], length)
            self._num_launches += 1
        for row, item, track in followed:
            track.ahead = Ahead(pending, row, length, self._num_launches, item.slot, item.start, item.num_new)
        for item, kept in states:
            self._add(item, kept)

    def known(self, item: ScheduledSequence) -> tuple[int, ...]:
        pending, row = self._in_plan.pop(item.sequence.id)
        return tuple(pending.wait()[row, : len(item.drafts)].clip(0).tolist())

    def _taken(self, item: ScheduledSequence, pending: PendingDrafts, row: int, on_device: bool) -> tuple[int, ...]:
        """The drafts of a row for a decode."""
        if on_device:
            self._in_plan[item.sequence.id] = pending, row
            return (ON_DEVICE,) * (item.num_new - 1)
        return tuple(pending.wait()[row, : item.num_new - 1].clip(0).tolist())

    def _settle(self, sequence: Sequence, end: int) -> None:
        """Count the entries of a verification that accepted the tokens before `end`, the newest one."""
        track = self._tracks.get(sequence.id)
        ahead = None if track is None else track.ahead
        if track is None or ahead is None or ahead.end >= 0:
            return
        if ahead.start < end <= ahead.start + ahead.count:
            self.runner.blocks.computed(self._slots.tables[ahead.slot], ahead.start, end)
            track.start = ahead.end = end
        else:
            track.ahead = None

    def _ahead(self, sequence: Sequence) -> Ahead | None:
        """The drafts on the device that follow the newest token of a sequence."""
        track = self._tracks.get(sequence.id)
        ahead = None if track is None else track.ahead
        if ahead is None or ahead.end != sequence.num_tokens - 1 or self._num_launches - ahead.number > RECENT:
            return None
        return ahead

    def _fill_by_passes(
        self, items: Sequences[ScheduledSequence], runs: list[HeadRun], given: Array
    ) -> list[tuple[int, ...]]:
        """One draft token after the other, drawn on the host."""
        guesses: list[list[int]] = [[] for _ in items]
        hidden = self._draw(items, range(len(items)), runs, given, guesses, own_states=False)
        self._computed(runs)
        while active := [i for i, item in enumerate(items) if 0 < len(guesses[i]) < item.num_new - 1]:
            runs = []
            for i in active:
                sequence, track = items[i].sequence, self._tracks[items[i].sequence.id]
                position = sequence.num_tokens - 2 + len(guesses[i])
                runs.append(
                    HeadRun(self._table(items[i]), track.context_start, position, guesses[i][-1:], _rope(sequence))
                )
            states = hidden[active[0] : active[0] + 1] if len(active) == 1 else self.runner.kernels.take(hidden, active)
            rows = self._draw(items, active, runs, states, guesses, own_states=True)
            hidden = _put(hidden, active, rows) if len(active) < len(items) else rows
        return [tuple(guess) for guess in guesses]

    def _first_runs(self, items: Sequences[ScheduledSequence]) -> tuple[list[HeadRun], Array]:
        """The pass over all kept states, which gives the first drafts: its tokens, and the states."""
        runs, states, most = [], [], LATE_STATES
        if self.runner.on_device is not None:
            most = max(most, CAPTURED_STATES // len(items))
        for item in items:
            track = self._tracks[item.sequence.id]
            self._skip_shared(item, track)
            if track.count > most:
                self._compute(item, track, track.count - 1)
            start, count = track.start, track.count
            tokens = item.sequence.token_ids[start + 1 : start + 1 + count]
            runs.append(HeadRun(self._table(item), track.context_start, start, tokens, _rope(item.sequence)))
            states += track.take(count)
        return runs, _joined(states)

    def _computed(self, runs: list[HeadRun]) -> None:
        for run in runs:
            self.runner.blocks.computed(run.table, run.start, run.start + len(run.tokens))

    def _skip_shared(self, item: ScheduledSequence, track: Track) -> None:
        """Drop states whose entries a fork of the same prompt computed in shared blocks; the last one gives logits."""
        table, blocks = self._table(item), self.runner.blocks
        count = 0
        while count < track.count - 1 and blocks.has(table, track.start + count):
            count += 1
        if count:
            track.take(count)

    def _compute(self, item: ScheduledSequence, track: Track, count: int) -> None:
        """Compute the entries of the first `count` states."""
        table = self._table(item)
        while count:
            size = min(count, self._most_read)
            start = track.start
            tokens = list(item.sequence.tokens_until(start + 1 + size)[start + 1 : start + 1 + size])
            states = track.take(size)
            given = _joined(states)
            run = HeadRun(table, track.context_start, start, tokens, _rope(item.sequence))
            self.runner.read(run, given, item.slot)
            self.runner.blocks.computed(table, start, start + size)
            count -= size

    @property
    def _most_read(self) -> int:
        """States that one pass reads at most."""
        return self._chunk_size if self.runner.on_device is None else min(self._chunk_size, CAPTURED_STATES)

    def _table(self, item: ScheduledSequence) -> np.ndarray:
        table: np.ndarray = self._slots.tables[item.slot]
        return table

    def _draw(
        self,
        items: Sequences[ScheduledSequence],
        active: Sequences[int],
        runs: list[HeadRun],
        states: Array,
        guesses: list[list[int]],
        *,
        own_states: bool,
    ) -> Array:
        """One pass over these runs: each of the `active` items gets one more draft token."""
        started = time.perf_counter()
        logits, hidden = self.runner.run(runs, states, AttentionPhase.DECODE, own_states=own_states)
        slots = [items[i].slot for i in active]
        positions = [items[i].sequence.num_tokens + len(guesses[i]) for i in active]
        drawn = self._sample(logits, slots, positions, [guesses[i] for i in active])
        self.measured(sum(len(run.tokens) for run in runs), time.perf_counter() - started)
        for i, token in zip(active, drawn, strict=True):
            guesses[i].append(max(int(token), 0))  # a row that cannot be sampled drafts token 0
        return hidden

    def _sample(
        self, logits: Array, slots: list[int], positions: list[int], pending: list[list[int]]
    ) -> Sequences[int]:
        """Sample with the noise of the position; logits of a smaller vocabulary are placed in the target's."""
        ids, sampler = self.runner.weights.token_ids, self._slots.sampler
        if ids is None:
            return list(sampler.sample(logits, slots, positions, pending).token_ids)
        found, table = self.runner.kernels.to_host(logits), sampler.table
        if not (table.temperature[slots].any() or table.is_edited[slots].any()):
            return list(ids[found.argmax(axis=-1)])
        whole = np.full((len(found), sampler.vocab_size), -np.inf, np.float32)
        whole[:, ids] = found
        return list(sampler.sample(whole, slots, positions, pending).token_ids)


def _zeros(states: Array, count: int) -> Array:
    """[count, width], for positions whose states were not returned."""
    return _joined([array_namespace(states).zeros_like(states[:1])] * count)


def _joined(states: list[Array]) -> Array:
    """[n, width]: states one after the other."""
    return states[0] if len(states) == 1 else array_namespace(states[0]).concat(states, axis=0)


def _put(rows: Array, places: list[int], values: Array) -> Array:
    rows = rows + 0  # a copy: an array of the device may be read by a pass in flight
    rows[places] = values
    return rows


def _rope(sequence: Sequence) -> int:
    return sequence.request.rope or 0
