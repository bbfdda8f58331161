# mypy: disallow-untyped-decorators=False
"""Per-slot state on the device: block tables, cached lengths, newest tokens, sampling parameters.

    words    |<-- tables [slots, blocks] -->| lengths | tokens | warmths | ... | seeds | top_ps | min_weights | ... |
    changes  (place, number) pairs into the words, which are one array of 32 bits each; from the seeds on two words each

The host collects differences and sends them in one small copy with the next launch; a decode step reads its inputs from
the slots that take part and leaves its tokens there, where the next step finds them.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from bifolio.kernels.logit_edits import MAX_ENDS, LogitEdits
from bifolio.kernels.triton.pdl import OVERLAPPED, wait_for_inputs
from bifolio.kernels.weights import ONE, warmth_of

STAGING_BUFFERS = 12  # pinned buffers that take turns; a step takes up to four, and two steps are in flight at most


class DeviceState:
    """The state of all slots on the device, and the differences that the host has not sent yet."""

    def __init__(self, num_slots: int, max_blocks: int, device: str) -> None:
        self.num_slots, self.max_blocks, self.device = num_slots, max_blocks, device
        self.on_gpu = device.startswith("cuda")
        places = num_slots * max_blocks + num_slots * np.array([*range(12), 11 + MAX_ENDS])
        places[-1] += places[-1] % 2  # numbers of 64 bits follow
        self._lengths, self._tokens, self._warmths, self._top_ks, self._num_scores = places[:5].tolist()
        self._edit_flags, self._repetitions, self._min_lengths, self._reads, self._writes = places[5:10].tolist()
        self._ropes, self._ends, self._wide = int(places[10]), int(places[11]), int(places[-1])
        self.words = torch.zeros(self._wide + 2 * 8 * num_slots, dtype=torch.int32, device=device)

        def column(place: int) -> torch.Tensor:
            return self.words[place : place + num_slots]

        wide = self.words[self._wide :].view(torch.int64).view(8, num_slots)
        narrow = self.words[self._lengths : self._ends].view(11, num_slots)
        self.columns = narrow, wide  # a column of each slot; the ends of edits are not among them
        self.tables = self.words[: num_slots * max_blocks].view(num_slots, max_blocks)  # i32
        self.lengths = column(self._lengths)  # i32  tokens in the cache
        self.tokens = column(self._tokens)  # i32  newest, not in the cache yet
        self.warmths = column(self._warmths).view(torch.float32)  # 1 / temperature; 0: greedy
        self.top_ks = column(self._top_ks)  # i32  0: off
        self.num_scores = column(self._num_scores)  # i32  0: no logprobs; else 1 and the number of most likely tokens
        self.edit_flags = column(self._edit_flags)  # i32  see `kernels.triton.edits`; 0: none
        self.repetitions = column(self._repetitions).view(torch.float32)
        self.min_lengths = column(self._min_lengths)  # i32
        self.reads = column(self._reads)  # i32  recurrent state before the next token
        self.writes = column(self._writes)  # i32  recurrent state that the next token leaves; -1: none
        self.ropes = column(self._ropes)  # i32  added to positions of newest tokens (`DeviceSlots.set_params`)
        self.ends = self.words[self._ends : self._ends + MAX_ENDS * num_slots]  # i32[slots, MAX_ENDS]  -1: none
        self.seeds = wide[0]  # i64
        self.top_ps = wide[1].view(torch.float64)  # 2: off
        self.min_weights = wide[2]  # i64  the least that min_p keeps; 0: off
        self.penalties = wide[3:5].view(torch.float64)  # f64[2, slots]  presence, frequency
        self.rare_options = wide[5:].view(torch.float64)  # f64[3, slots]  typical_p, threshold and probability of XTC
        self._states: np.ndarray = np.zeros((2, num_slots), dtype=np.int32)  # reads and writes as they were sent last
        self._places: list[np.ndarray] = []
        self._numbers: list[np.ndarray] = []
        self._ring: deque[tuple[torch.Tensor, Any]] = deque()  # pinned buffers and the events that free them

    # -- differences ---------------------------------------------------------------------------------------------------
    def set_blocks(self, slot: int, first: int, block_ids: Any) -> None:
        start = slot * self.max_blocks + first
        self._add(np.arange(start, start + len(block_ids)), np.asarray(block_ids, dtype=np.int32))

    def set_sampling(
        self, slot: int, temperature: float, seed: int, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
    ) -> None:
        warmth = warmth_of(np.array([temperature])) if temperature > 0 else np.zeros(1, np.float32)
        self._add(np.array([self._warmths + slot]), warmth.view(np.int32))
        self._add(np.array([self._top_ks + slot]), np.array([top_k]))
        bits = np.array([top_p if top_p < 1.0 else 2.0]).view(np.uint64)[0]
        wide = np.array([seed & 0xFFFFFFFFFFFFFFFF, bits, math.ceil(min_p * ONE)], dtype=np.uint64)
        self._add_wide(slot, 0, wide)

    def set_rope(self, slot: int, rope: int) -> None:
        self._add(np.array([self._ropes + slot]), np.array([rope]))

    def set_rare_options(self, slot: int, typical_p: float, xtc_threshold: float, xtc_probability: float) -> None:
        self._add_wide(slot, 5, np.array([typical_p, xtc_threshold, xtc_probability], dtype=np.float64))

    def set_logprobs(self, slot: int, num_top: int | None) -> None:
        """Whether drawn tokens are scored, beside how many of the most likely ones."""
        self._add(np.array([self._num_scores + slot]), np.array([0 if num_top is None else num_top + 1]))

    def set_edits(self, slot: int, flags: int, edits: LogitEdits | None) -> None:
        """Single numbers of the slot's edits; without edits the flags are 0 and nothing else is read."""
        self._add(np.array([self._edit_flags + slot]), np.array([flags]))
        if edits is None:
            return
        self._add(np.array([self._min_lengths + slot]), np.array([edits.min_length]))
        repetition = np.array([edits.repetition_penalty], dtype=np.float32)
        self._add(np.array([self._repetitions + slot]), repetition.view(np.int32))
        ends = np.full(MAX_ENDS, -1, dtype=np.int32)
        ends[: len(edits.end_ids)] = edits.end_ids
        self._add(self._ends + MAX_ENDS * slot + np.arange(MAX_ENDS), ends)
        self._add_wide(slot, 3, np.array([edits.presence_penalty, edits.frequency_penalty]))

    def set_lengths(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        self._add(self._lengths + slots, lengths)

    def set_tokens(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        self._add(self._tokens + slots, tokens)

    def set_states(self, slots: np.ndarray, reads: np.ndarray, writes: np.ndarray) -> None:
        """The recurrent states of the next step of slots; unchanged ones are not sent again."""
        for place, row, numbers in ((self._reads, 0, reads), (self._writes, 1, writes)):
            changed = self._states[row, slots] != numbers
            if changed.any():
                self._states[row, slots] = numbers
                self._add(place + slots[changed], numbers[changed])

    def take_changes(self) -> np.ndarray | None:
        """i32[2, count]: places and numbers since the last call, the latest for each place."""
        if not self._places:
            return None
        is_single = len(self._places) == 1  # the places of one change differ
        places, numbers = np.concatenate(self._places), np.concatenate(self._numbers)
        self._places, self._numbers = [], []
        if is_single:
            return np.stack([places, numbers]).astype(np.int32)
        _, first_from_behind = np.unique(places[::-1], return_index=True)
        if len(first_from_behind) < len(places):
            last = len(places) - 1 - first_from_behind
            places, numbers = places[last], numbers[last]
        return np.stack([places, numbers]).astype(np.int32)

    def _add(self, places: np.ndarray, numbers: np.ndarray) -> None:
        self._places.append(places)
        self._numbers.append(np.asarray(numbers, dtype=np.int32))

    def _add_wide(self, slot: int, column: int, numbers: np.ndarray) -> None:
        """Numbers of 64 bits, in as many columns from `column` on."""
        first = self._wide + 2 * (slot + self.num_slots * (column + np.arange(len(numbers))))
        self._add(np.stack([first, first + 1], axis=1).reshape(-1), numbers.view(np.int32))  # little end first

    # -- sending -------------------------------------------------------------------------------------------------------
    def send(self) -> None:
        """Send the pending differences."""
        changes = self.take_changes()
        if changes is not None:
            apply_changes(self.words, self.upload(changes.reshape(-1)).view(2, -1))

    def send_words(self, words: np.ndarray) -> torch.Tensor:
        """i32[n] on the device: `words`, sent in one copy with the pending differences."""
        changes = self.take_changes()
        sent = self.upload(words if changes is None else np.concatenate([words, changes.reshape(-1)]))
        if changes is not None:
            apply_changes(self.words, sent[len(words) :].view(2, -1))
        return sent[: len(words)]

    def upload(self, words: np.ndarray) -> torch.Tensor:
        """i32[n] on the device: `words`, on their way when this returns."""
        if not self.on_gpu:
            return torch.from_numpy(words.copy())
        staged = self._staging(len(words))
        staged.numpy()[: len(words)] = words
        sent = staged[: len(words)].to(self.device, non_blocking=True)
        self._ring.append((staged, recorded_event()))
        return sent

    def _staging(self, count: int) -> torch.Tensor:
        """A pinned buffer that no copy reads any more."""
        if len(self._ring) >= STAGING_BUFFERS:
            buffer, event = self._ring.popleft()
            event.synchronize()
            if len(buffer) >= count:
                return buffer
        return torch.empty(max(4096, 2 * count), dtype=torch.int32, pin_memory=True)


def recorded_event() -> Any:
    """An event that comes when everything launched so far is done."""
    cuda: Any = torch.cuda
    event = cuda.Event()
    event.record()
    return event


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["state", "changes"])
def _apply_changes_kernel(
    state: tl.tensor,  # i32[n]
    changes: tl.tensor,  # i32[2, count]  places, then numbers
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    place = tl.load(changes + index, mask=inside, other=0)
    tl.store(state + place, tl.load(changes + count + index, mask=inside, other=0), mask=inside)


def apply_changes(state: torch.Tensor, changes: torch.Tensor) -> None:
    """state[places] = numbers, for i32[2, count] changes whose places differ."""
    count = changes.shape[1]
    _apply_changes_kernel[(triton.cdiv(count, 256),)](state, changes, count, BLOCK=256, num_warps=4)


@triton.jit(
    do_not_specialize=["num_rows", "table_stride"],
    do_not_specialize_on_alignment=["rows", "tables", "lengths", "ropes", "last_tokens"],
)
def _begin_step_kernel(
    rows: tl.tensor,  # i32[r]  slot of each row; -1: padding
    tables: tl.tensor,  # i32[slots, max_blocks]
    lengths: tl.tensor,  # i32[slots]
    ropes: tl.tensor,  # i32[slots]
    last_tokens: tl.tensor,  # i32[slots]
    token_ids: tl.tensor,  # i32[r]
    positions: tl.tensor,  # i32[r]
    places: tl.tensor,  # i64[r]
    contexts: tl.tensor,  # i32[r]
    table_rows: tl.tensor,  # i32[r]
    turn: tl.tensor,  # i32[1]
    num_rows: tl.tensor,
    table_stride: tl.tensor,
    TURNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    wait_for_inputs()
    if tl.program_id(0) == 0:
        tl.store(turn, (tl.load(turn) + 1) % TURNS)
    slot = tl.load(rows + row, mask=exists, other=-1)
    real = slot >= 0
    position = tl.load(lengths + slot, mask=real, other=0)
    token = tl.load(last_tokens + slot, mask=real, other=0)
    block = tl.load(tables + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE, mask=real, other=0)
    tl.store(token_ids + row, tl.maximum(token, 0), mask=exists)  # -1: nothing could be chosen; the row is given up
    tl.store(positions + row, position + tl.load(ropes + slot, mask=real, other=0), mask=exists)
    tl.store(places + row, block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE, mask=exists)
    tl.store(contexts + row, tl.where(real, position + 1, 0), mask=exists)
    tl.store(table_rows + row, tl.maximum(slot, 0), mask=exists)


def begin_step(
    rows: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    ropes: torch.Tensor,
    last_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    places: torch.Tensor,
    contexts: torch.Tensor,
    table_rows: torch.Tensor,
    turn: torch.Tensor,
    block_size: int,
    turns: int,
) -> None:
    """Lay out the next token of every row: id, position, place of its K and V, context length."""
    num_rows = rows.shape[0]
    block = 64
    _begin_step_kernel[(triton.cdiv(num_rows, block),)](
        rows,
        tables,
        lengths,
        ropes,
        last_tokens,
        token_ids,
        positions,
        places,
        contexts,
        table_rows,
        turn,
        num_rows,
        tables.stride(0),
        TURNS=turns,
        BLOCK_SIZE=block_size,
        BLOCK=block,
        num_warps=1,
        **OVERLAPPED,
    )


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "slot_reads", "slot_writes"])
def _begin_states_kernel(
    rows: tl.tensor,  # i32[r]  slot of each row; -1: padding
    slot_reads: tl.tensor,  # i32[slots]
    slot_writes: tl.tensor,
    reads: tl.tensor,  # i32[r]
    writes: tl.tensor,
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = row < num_rows
    wait_for_inputs()
    slot = tl.load(rows + row, mask=exists, other=-1)
    tl.store(reads + row, tl.load(slot_reads + slot, mask=slot >= 0, other=0), mask=exists)
    tl.store(writes + row, tl.load(slot_writes + slot, mask=slot >= 0, other=-1), mask=exists)


def begin_states(rows: torch.Tensor, state: DeviceState, reads: torch.Tensor, writes: torch.Tensor) -> None:
    """Lay out the recurrent states of every row; padding reads the empty state and writes none."""
    block = 64
    grid = (triton.cdiv(rows.shape[0], block),)
    _begin_states_kernel[grid](
        rows, state.reads, state.writes, reads, writes, rows.shape[0], BLOCK=block, num_warps=1, **OVERLAPPED
    )
