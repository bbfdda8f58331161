"""Permanent rows on the device side: block tables by slot, updated by differences; plan → batch.

A sequence keeps its row as long as it runs, so a step writes only what changed: the block a row gained, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.kernels.interface import AttentionPhase, AttentionSegment, Batch, KernelSet
from bifolio.schedule.plan import ScheduledSequence, StepPlan


class Run(NamedTuple):
    """Tokens of one slot that stand next to each other in the batch."""

    slot: int
    start: int  # position of the first
    tokens: Sequences[int] | NDArray[np.int32]


@dataclass(slots=True)
class Readout:
    """What is to be done with the logits of a step; rows count the logits that the batch asks for."""

    logit_rows: list[int] = field(default_factory=list)  # tokens of the batch whose logits are wanted
    sample_rows: list[int] = field(default_factory=list)  # row that each drawn token comes from
    sample_slots: list[int] = field(default_factory=list)  # slot whose parameters draw it
    positions: list[int] = field(default_factory=list)  # index of the token to be drawn in its sequence
    pending: list[tuple[int, ...]] = field(default_factory=list)  # guesses that stand before the drawn token
    group_rows: dict[int, int] = field(default_factory=dict)  # sequence id → row: logits that a search looks at
    prompt_rows: dict[int, int] = field(default_factory=dict)  # slot → first of the rows that score its prompt

    def add(self, item: ScheduledSequence, first: int) -> None:
        """Ask for what this sequence needs; `first` is the index of its first token in the batch."""
        end, guesses = first + item.num_new, item.drafts
        if wants_prompt_logits(item):
            self.prompt_rows[item.slot] = len(self.logit_rows)
            self.logit_rows.extend(range(first, end))
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


class DeviceRows:
    """Block tables of all slots."""

    def __init__(self, max_slots: int, max_blocks: int, blocks: KVCacheBlockManager, kernels: KernelSet) -> None:
        self.tables = np.zeros((max_slots, max_blocks), dtype=np.int32)  # padded with block 0
        self._blocks = blocks
        self._kernels = kernels

    def update(self, plan: StepPlan) -> None:
        """Bring the tables of the scheduled sequences up to date."""
        slot_of = {item.sequence.id: item.slot for item in plan.scheduled}
        for sequence_id, first, block_ids in self._blocks.take_many_row_changes(slot_of):
            self.tables[slot_of[sequence_id], first : first + len(block_ids)] = block_ids

    def stage(self, plan: StepPlan) -> tuple[Batch, Readout]:
        """The plan as one flat batch, decodes first, and what its logits are for."""
        readout = Readout()
        first = 0
        for item in plan.scheduled:
            readout.add(item, first)
            first += item.num_new
        batch = self.lay_out(
            [_run(item) for item in plan.decodes], [_run(item) for item in plan.prefills], readout.logit_rows
        )
        return batch, readout

    def lay_out(self, decodes: list[Run], prefills: list[Run], logit_rows: Sequences[int]) -> Batch:
        """Flat arrays for these runs of tokens; every run's blocks are in its slot's table."""
        runs = decodes + prefills
        count = len(runs)
        slots = np.fromiter((run.slot for run in runs), dtype=np.int32, count=count)
        starts = np.fromiter((run.start for run in runs), dtype=np.int32, count=count)
        lengths = np.fromiter((len(run.tokens) for run in runs), dtype=np.int32, count=count)
        offsets = np.zeros(count + 1, dtype=np.int32)
        np.cumsum(lengths, out=offsets[1:])
        if int(offsets[-1]) == count:  # one token each, the usual decode step
            owners, positions = np.arange(count), starts
        else:
            owners = np.repeat(np.arange(count), lengths)
            positions = np.arange(offsets[-1], dtype=np.int32) - offsets[owners] + starts[owners]
        size = self._blocks.block_size
        blocks = self.tables[slots[owners], positions // size].astype(np.int64)
        to_device = self._kernels.from_host
        return Batch(
            token_ids=to_device(_joined(runs, int(offsets[-1]))),
            positions=to_device(positions),
            slots=to_device(blocks * size + positions % size),
            segments=self._segments(len(decodes), slots, starts, lengths, offsets),
            logit_rows=to_device(np.asarray(logit_rows, dtype=np.int32)),
            max_position=int(positions.max()) if count else 0,
        )

    def _segments(
        self, border: int, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, offsets: np.ndarray
    ) -> tuple[AttentionSegment, ...]:
        segments = []
        for phase, first, last in (
            (AttentionPhase.DECODE, 0, border),
            (AttentionPhase.PREFILL, border, len(slots)),
        ):
            if first == last:
                continue
            contexts = starts[first:last] + lengths[first:last]
            longest = int(contexts.max())
            width = self._blocks.blocks_for(longest)
            segments.append(
                AttentionSegment(
                    phase=phase,
                    token_start=int(offsets[first]),
                    token_end=int(offsets[last]),
                    query_starts=offsets[first : last + 1] - offsets[first],
                    context_lens=contexts,
                    block_tables=self._kernels.from_host(self.tables[slots[first:last], :width]),
                    fresh=phase is AttentionPhase.PREFILL and not starts[first:last].any(),
                    max_query_len=int(lengths[first:last].max()),
                    max_context_len=longest,
                )
            )
        return tuple(segments)


def _run(item: ScheduledSequence) -> Run:
    tokens = item.sequence.token_ids
    if item.num_new == 1:
        return Run(item.slot, item.start, (tokens[item.start],))
    end = item.start + item.num_new - len(item.drafts)
    if not item.drafts:
        return Run(item.slot, item.start, item.sequence.tokens_until(end)[item.start : end])
    return Run(item.slot, item.start, [*tokens[item.start : end], *item.drafts])


def _joined(runs: list[Run], count: int) -> NDArray[np.int32]:
    """i32[count]: the tokens of all runs."""
    if count == len(runs):
        return np.array([token for run in runs for token in run.tokens], dtype=np.int32)
    return np.concatenate([np.asarray(run.tokens, dtype=np.int32) for run in runs])


def wants_prompt_logits(item: ScheduledSequence) -> bool:
    """The request asked for logprobs of its prompt, and this chunk lies in the prompt."""
    sequence = item.sequence
    return sequence.request.params.prompt_logprobs is not None and item.start < sequence.num_prompt
