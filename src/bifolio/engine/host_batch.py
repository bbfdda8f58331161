"""The arrays of a plan: `HostBatch`, one flat batch in numpy, and `Readout`, the use of its logits.

Every pass of the engine, of the executors and of `LanguageModel` is laid out here. A host batch holds plain arrays and
can be sent to another process; `to` converts it for a kernel set.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bifolio.cache.table_states import StatePass
from bifolio.images import runs_of, shift_at
from bifolio.kernels.interface import AttentionSegment, Batch, KernelSet, StateUse
from bifolio.long_rope import LONG_ROPE
from bifolio.schedule.orchestrators import DecodeOrchestrator, PrefillOrchestrator
from bifolio.schedule.plan import ScheduledSequence, StepPlan

ON_DEVICE = -1  # placeholder of a token that a launched step samples on the device


class Run(NamedTuple):
    """Consecutive tokens of one sequence, contiguous in the batch."""

    table: int  # row of the block tables
    start: int  # position of the first
    tokens: Sequences[int] | NDArray[np.int32]
    rope: int = 0  # added to positions; LONG_ROPE: the long set of frequencies rotates them (`bifolio.long_rope`)
    causal: bool = True  # False: each sees all of them
    second_start: int = 0  # tokens from here on belong to the second of two texts; 0: there is one


@dataclass(frozen=True, slots=True)
class HostBatch:
    """One forward pass in numpy arrays; the fields are those of `Batch`."""

    token_ids: NDArray[np.int32]  # i32[t]  -1: sampled on the device by a step in flight
    positions: NDArray[np.int32]  # i32[t]  + LONG_ROPE where the long set rotates
    cache_index: NDArray[np.int64] | None  # i64[t]  None: no cache
    segments: tuple[AttentionSegment, ...]
    logit_rows: NDArray[np.int32] | None  # i32[r]  None: all
    states: StateUse | None = None  # None: no recurrent layers, or no cache

    @classmethod
    def from_plan(
        cls, plan: StepPlan, readout: Readout, tables: np.ndarray, newest: np.ndarray, block_size: int
    ) -> HostBatch:
        """The plan as one flat batch, decodes first.

        tables: i32[slots, blocks]. newest: i32[slots], tokens sampled by steps in flight.
        """
        decodes = [_run(item, newest) for item in plan.decodes]
        prefills = [run for item in plan.prefills for run in _runs(item, newest)]
        return cls.from_runs(decodes, prefills, tables, block_size, readout.logit_rows, plan.states)

    @classmethod
    def from_runs(
        cls,
        decodes: list[Run],
        prefills: list[Run],
        tables: np.ndarray | None,
        block_size: int = 1,
        logit_rows: Sequences[int] | None = None,
        states: Sequences[StatePass] | None = None,  # of decodes and prefills
    ) -> HostBatch:
        """Flat arrays of these runs of tokens; `tables` is None for a pass without a cache."""
        runs = decodes + prefills
        count, border = len(runs), len(decodes)
        owners_table = np.fromiter((run.table for run in runs), dtype=np.int32, count=count)
        starts = np.fromiter((run.start for run in runs), dtype=np.int32, count=count)
        lengths = np.fromiter((len(run.tokens) for run in runs), dtype=np.int32, count=count)
        num_tokens = int(lengths.sum())
        if num_tokens == count:  # one token each, the usual decode step
            owners, positions = np.arange(count), starts
        else:
            owners = np.repeat(np.arange(count), lengths)
            offsets = np.cumsum(lengths) - lengths
            positions = (np.arange(num_tokens) - offsets[owners] + starts[owners]).astype(np.int32)
        index = None
        if tables is not None:
            blocks = tables[owners_table[owners], positions // block_size].astype(np.int64)
            index = blocks * block_size + positions % block_size
        ropes = np.fromiter((run.rope for run in runs), dtype=np.int32, count=count)
        if ropes.any():
            positions = positions + ropes[owners]
        if any(run.second_start for run in runs):
            seconds = np.fromiter((run.second_start or LONG_ROPE for run in runs), dtype=np.int32, count=count)
            positions = positions + LONG_ROPE * (positions >= seconds[owners]).astype(np.int32)
        segments, token_start = [], 0
        for part in _alike(runs, border):
            orchestrator = DecodeOrchestrator if part.stop <= border else PrefillOrchestrator
            width = -(-int((starts[part] + lengths[part]).max()) // block_size)
            own = None if tables is None else tables[owners_table[part], :width]
            causal = runs[part.start].causal
            segment = orchestrator.lay_out(starts[part], lengths[part], own, token_start, causal)
            token_start = segment.token_end
            segments.append(segment)
        wanted = None if logit_rows is None else np.asarray(logit_rows, dtype=np.int32)
        used = None if states is None else _state_use(states, lengths)
        return cls(_joined(runs, num_tokens), positions, index, tuple(segments), wanted, used)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def to(self, kernels: KernelSet) -> Batch:
        """The batch in the kernel set's own arrays; segments' lengths and starts, and states, stay on the host."""
        if kernels.array_backend == "numpy":
            return self.on_host()
        upload = kernels.from_host
        segments = tuple(
            segment if segment.block_tables is None else replace(segment, block_tables=upload(segment.block_tables))
            for segment in self.segments
        )
        return Batch(
            token_ids=upload(self.token_ids),
            positions=upload(self.positions),
            cache_index=None if self.cache_index is None else upload(self.cache_index),
            segments=segments,
            logit_rows=None if self.logit_rows is None else upload(self.logit_rows),
            max_position=self._max_position,
            states=self.states,
        )

    def on_host(self) -> Batch:
        """The batch in numpy arrays."""
        return Batch(
            self.token_ids,
            self.positions,
            self.cache_index,
            self.segments,
            self.logit_rows,
            self._max_position,
            self.states,
        )

    @property
    def _max_position(self) -> int:
        return int((self.positions % LONG_ROPE).max()) if len(self.positions) else 0


@dataclass(slots=True)
class Readout:
    """The use of a step's logits; a row is an index into `logit_rows`."""

    logit_rows: list[int] = field(default_factory=list)  # tokens of the batch whose logits are computed
    sample_rows: list[int] = field(default_factory=list)  # row that each token is sampled from
    sample_slots: list[int] = field(default_factory=list)  # slot whose parameters apply
    positions: list[int] = field(default_factory=list)  # position of the sampled token in its sequence
    pending: list[tuple[int, ...]] = field(default_factory=list)  # draft tokens before the sampled one
    group_rows: dict[int, int] = field(default_factory=dict)  # sequence id → row: logits for beam search
    prompt_rows: dict[int, int] = field(default_factory=dict)  # slot → first row of its prompt logprobs

    @classmethod
    def from_plan(cls, plan: StepPlan) -> Readout:
        readout, first, items = cls(), 0, plan.decodes
        if plan.has_plain_decodes:  # in bulk
            first = len(items)
            readout.logit_rows, readout.sample_rows = list(range(first)), list(range(first))
            readout.sample_slots = [item.slot for item in items]
            readout.positions = [item.start + 1 for item in items]
            readout.pending = [()] * first
            items = plan.prefills
        elif plan.prefills:
            items = items + plan.prefills
        for item in items:
            readout._add(item, first)
            first += item.num_new
        return readout

    @property
    def is_plain(self) -> bool:
        """Whether only sampling reads the logits, one draw per row."""
        return len(self.sample_rows) == len(self.logit_rows) and not self.group_rows and not self.prompt_rows

    def _add(self, item: ScheduledSequence, first: int) -> None:
        """Add the logits that this sequence needs; `first` is the index of its first token in the batch."""
        end, guesses = first + item.num_new, item.drafts
        if wants_prompt_logits(item):
            self.prompt_rows[item.slot] = len(self.logit_rows)
            skipped = max(item.sequence.request.score_from - item.start, 0)
            self.logit_rows.extend(range(first + skipped, end))
        elif item.sample_slots:
            self.logit_rows.extend(range(end - 1 - len(guesses), end))
        if not item.sample_slots:
            return
        row = len(self.logit_rows) - 1 - len(guesses)
        if item.sequence.group is not None:
            self.group_rows[item.sequence.id] = row
            return
        for draw in range(1 + len(guesses)):
            for slot in item.sample_slots:
                self.sample_rows.append(row + draw)
                self.sample_slots.append(slot)
                self.positions.append(item.start + item.num_new - len(guesses) + draw)
                self.pending.append(guesses[:draw])


def wants_prompt_logits(item: ScheduledSequence) -> bool:
    """Whether the request has prompt logprobs and this chunk has tokens whose logits score the prompt."""
    sequence, request = item.sequence, item.sequence.request
    if request.params.prompt_logprobs is None or item.start >= sequence.num_prompt:
        return False
    return item.start + item.num_new > request.score_from


def newest_token(item: ScheduledSequence, newest: np.ndarray) -> int:
    """The token at `item.start`: known, or sampled by a step in flight."""
    tokens = item.sequence.token_ids
    return tokens[item.start] if item.start < len(tokens) else int(newest[item.slot])


def _run(item: ScheduledSequence, newest: np.ndarray) -> Run:
    tokens, request = item.sequence.token_ids, item.sequence.request
    rope = (request.rope or 0) + (shift_at(request.images, item.start) if request.images else 0)
    if item.num_new == 1:
        return Run(item.slot, item.start, (newest_token(item, newest),), rope)
    end = item.start + item.num_new - len(item.drafts)
    if not item.drafts:
        second = item.sequence.request.second_start
        return Run(item.slot, item.start, item.sequence.tokens_until(end)[item.start : end], rope, second_start=second)
    return Run(item.slot, item.start, [*tokens[item.start : end], *item.drafts], rope)


def _runs(item: ScheduledSequence, newest: np.ndarray) -> list[Run]:
    """The tokens of a prompt chunk; those of an image that is read both ways are a run of their own."""
    whole = _run(item, newest)
    if not any(image.both_ways for image in item.sequence.request.images):
        return [whole]
    cuts = runs_of(item.sequence.request.images, item.start, item.start + item.num_new)
    first = item.start
    return [
        whole._replace(start=start, tokens=whole.tokens[start - first : end - first], causal=causal)
        for start, end, causal in cuts
    ]


def _alike(runs: list[Run], border: int) -> Iterator[slice]:
    """The runs of each segment: the decodes, then neighbouring prompt chunks that are all causal or all not."""
    if border:
        yield slice(0, border)
    first = border
    for place in range(border + 1, len(runs) + 1):
        if place == len(runs) or runs[place].causal is not runs[first].causal:
            yield slice(first, place)
            first = place


def _state_use(states: Sequences[StatePass], lengths: NDArray[np.int32]) -> StateUse:
    """The states of each run as arrays: one read for each run, and the writes by token."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts[1:])
    writes = np.full(int(starts[-1]), -1, dtype=np.int32)
    for start, used in zip(starts.tolist(), states, strict=False):
        for index, state in used.writes:
            writes[start + index] = state
    return StateUse(starts, np.array([used.read for used in states], dtype=np.int32), writes)


def _joined(runs: list[Run], count: int) -> NDArray[np.int32]:
    """i32[count]: the tokens of all runs."""
    if count == len(runs):
        return np.array([token for run in runs for token in run.tokens], dtype=np.int32)
    return np.concatenate([np.asarray(run.tokens, dtype=np.int32) for run in runs])
