"""Permanent rows on the device side: block tables by slot, updated by differences; plan → batch.

A sequence keeps its row as long as it runs, so a step writes only what changed: the block a row gained, nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bifolio.cache.block_manager import KVCacheBlockManager
from bifolio.kernels.interface import AttentionPhase, AttentionSegment, Batch, KernelSet
from bifolio.schedule.plan import ScheduledSequence, StepPlan


class StagedStep(NamedTuple):
    """A batch and what is to be done with its logits, in rows of `batch.logit_rows`."""

    batch: Batch
    sample_rows: np.ndarray  # i32[m]  row of the logits that each drawn token comes from
    sample_slots: np.ndarray  # i32[m]  slot whose parameters draw it
    positions: np.ndarray  # i64[m]  index of the token to be drawn in its sequence
    prompt_rows: dict[int, tuple[int, int]]  # slot → rows of the logits that score its prompt's tokens


class DeviceRows:
    """Block tables of all slots."""

    def __init__(self, max_slots: int, max_blocks: int, blocks: KVCacheBlockManager, kernels: KernelSet) -> None:
        self.tables = np.zeros((max_slots, max_blocks), dtype=np.int32)  # padded with block 0
        self._blocks = blocks
        self._kernels = kernels

    def stage(self, plan: StepPlan) -> StagedStep:
        """Bring the tables up to date and lay the plan out as one flat batch, decodes first."""
        items = plan.scheduled
        self._update_tables(items)
        slots = np.fromiter((item.slot for item in items), dtype=np.int32, count=len(items))
        starts = np.fromiter((item.start for item in items), dtype=np.int32, count=len(items))
        lengths = np.fromiter((item.num_new for item in items), dtype=np.int32, count=len(items))
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)])
        owners = np.repeat(np.arange(len(items)), lengths)
        positions = np.arange(offsets[-1], dtype=np.int32) - offsets[owners] + starts[owners]
        size = self._blocks.block_size
        blocks = self.tables[slots[owners], positions // size].astype(np.int64)
        logit_rows, prompt_rows, samples = self._logit_rows(items, offsets)
        to_device = self._kernels.from_host
        batch = Batch(
            token_ids=to_device(self._token_ids(plan)),
            positions=to_device(positions),
            slots=to_device(blocks * size + positions % size),
            segments=self._segments(plan, slots, starts, lengths, offsets),
            logit_rows=to_device(logit_rows),
            max_position=int(positions.max()) if len(positions) else 0,
        )
        rows, sample_slots, sample_positions = samples
        return StagedStep(batch, rows, sample_slots, sample_positions, prompt_rows)

    def _update_tables(self, items: tuple[ScheduledSequence, ...]) -> None:
        slot_of = {item.sequence.id: item.slot for item in items}
        for sequence_id, first, block_ids in self._blocks.take_many_row_changes(slot_of):
            self.tables[slot_of[sequence_id], first : first + len(block_ids)] = block_ids

    def _token_ids(self, plan: StepPlan) -> np.ndarray:
        tokens: list[int] = []
        for item in plan.scheduled:
            if item.num_new == 1 and not item.drafts:
                tokens.append(item.sequence.token_ids[item.start])
            else:
                tokens.extend(item.sequence.token_ids[item.start : item.start + item.num_new - len(item.drafts)])
                tokens.extend(item.drafts)
        return np.array(tokens, dtype=np.int32)

    def _segments(
        self, plan: StepPlan, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, offsets: np.ndarray
    ) -> tuple[AttentionSegment, ...]:
        segments = []
        border = len(plan.decodes)
        for phase, first, last in (
            (AttentionPhase.DECODE, 0, border),
            (AttentionPhase.PREFILL, border, len(slots)),
        ):
            if first == last:
                continue
            contexts = starts[first:last] + lengths[first:last]
            width = self._blocks.blocks_for(int(contexts.max()))
            segments.append(
                AttentionSegment(
                    phase=phase,
                    token_start=int(offsets[first]),
                    token_end=int(offsets[last]),
                    query_starts=offsets[first : last + 1] - offsets[first],
                    context_lens=contexts,
                    block_tables=self._kernels.from_host(self.tables[slots[first:last], :width]),
                    fresh=not starts[first:last].any(),
                    max_query_len=int(lengths[first:last].max()),
                    max_context_len=int(contexts.max()),
                )
            )
        return tuple(segments)

    def _logit_rows(
        self, items: tuple[ScheduledSequence, ...], offsets: np.ndarray
    ) -> tuple[np.ndarray, dict[int, tuple[int, int]], tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Which tokens need logits: all of a chunk whose prompt is scored, else those that a draw comes from."""
        wanted: list[int] = []
        prompt_rows: dict[int, tuple[int, int]] = {}
        rows: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        for item, offset, end in zip(items, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            if wants_prompt_logits(item):
                prompt_rows[item.slot] = (len(wanted), len(wanted) + item.num_new)
                wanted.extend(range(offset, end))
            elif item.sample_slots:
                wanted.extend(range(end - 1 - len(item.drafts), end))
            if item.sample_slots:
                first = len(wanted) - 1 - len(item.drafts)
                for draw in range(1 + len(item.drafts)):
                    rows.extend([first + draw] * len(item.sample_slots))
                    slots.extend(item.sample_slots)
                    at = item.start + item.num_new - len(item.drafts) + draw
                    positions.extend([at] * len(item.sample_slots))
        return (
            np.array(wanted, dtype=np.int32),
            prompt_rows,
            (np.array(rows, np.int32), np.array(slots, np.int32), np.array(positions, np.int64)),
        )


def wants_prompt_logits(item: ScheduledSequence) -> bool:
    """The request asked for logprobs of its prompt, and this chunk lies in the prompt."""
    sequence = item.sequence
    return sequence.request.params.prompt_logprobs is not None and item.start < sequence.num_prompt
