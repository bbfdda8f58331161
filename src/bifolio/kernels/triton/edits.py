# mypy: disallow-untyped-decorators=False
"""Changes to single logits on the device: bias, penalties, bans and masks, with the arithmetic of `sampling.edits`.

    counts  i32[slots, vocab]     occurrences in the output; the sign bit says that the token occurs in the prompt
    bias    f32[slots, vocab]     added to the logits; -inf for tokens that are never drawn
    masks   i32[slots, vocab/32]  bits of the tokens that a grammar allows next

The arrays are allocated with the first slot that needs them. A launched step reads them, edits the logits (beside the
model's own where logprobs read those), and counts the token that it chose; so the host sends a slot's history once, and
a mask with each step.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from bifolio.kernels.logit_edits import MAX_ENDS, LogitEdits
from bifolio.kernels.triton.device_state import DeviceState, apply_changes, recorded_event
from bifolio.kernels.triton.pdl import wait_for_inputs
from bifolio.kernels.triton.weights import EXACT

BIAS, COUNTS, ENDS, MASK = 1, 2, 4, 8  # flags of a slot: the edits that it has
IN_PROMPT = -(1 << 31)  # the sign bit of a count
_EXCLUDED = int(np.array(-np.inf, np.float32).view(np.int32))
_MASK_BUFFERS = 3  # pinned buffers of masks that take turns: two steps are in flight at most


def flags_of(edits: LogitEdits) -> int:
    has_ends = edits.min_length > 0 and len(edits.end_ids) > 0
    return BIAS * edits.has_bias | COUNTS * edits.counts_tokens | ENDS * has_ends | MASK * edits.has_mask


class SlotRows:
    """A matrix i32[slots, width] whose rows the host replaces; replacements are sent together."""

    def __init__(self, state: DeviceState, width: int) -> None:
        self._state, self.width = state, width
        self.words = torch.zeros((state.num_slots, width), dtype=torch.int32, device=state.device)
        self._pending: dict[int, tuple[int, np.ndarray, np.ndarray]] = {}  # by slot: fill, columns, numbers

    def replace(self, slot: int, fill: int, columns: np.ndarray, numbers: np.ndarray) -> None:
        """The slot's row becomes `fill`, with 32-bit `numbers` at `columns`, which differ."""
        self._pending[slot] = fill, slot * self.width + columns, numbers.view(np.int32)

    def send(self) -> None:
        if not self._pending:
            return
        fills, places, numbers = zip(*self._pending.values(), strict=True)
        count = len(fills)
        parts = [np.array(list(self._pending)), np.array(fills), *places, *numbers]
        sent = self._state.upload(np.concatenate(parts).astype(np.int32))
        self._pending = {}
        _fill_rows_kernel[(triton.cdiv(self.width, 4096), count)](self.words, sent, self.width, count, BLOCK=4096)
        if len(sent) > 2 * count:
            apply_changes(self.words.view(-1), sent[2 * count :].view(2, -1))


class SlotMasks:
    """A matrix i32[slots, width] of bits whose rows are filled in pinned host memory and sent in one copy.

    buffer  |<- slots [count] ->|<- rows [count, width] ->|<- not used ->|
    """

    def __init__(self, state: DeviceState, width: int) -> None:
        self._state, self._width = state, width
        self.words = torch.zeros((state.num_slots, width), dtype=torch.int32, device=state.device)
        self._ring: deque[tuple[torch.Tensor, Any]] = deque()  # buffers, and the events after which they are free
        self._filled: torch.Tensor | None = None  # the buffer of the rows that are not sent yet
        self._count = 0  # of these rows

    def rows(self, slots: np.ndarray) -> np.ndarray:
        """i32[n, width]: host memory for the rows of slots, which the next `send` sends."""
        self._filled = self._filled if self._filled is not None else self._free_buffer()
        self._count = count = len(slots)
        words: np.ndarray = self._filled.numpy()[: count * (1 + self._width)]
        words[:count] = slots
        return words[count:].reshape(count, self._width)

    def send(self) -> None:
        if self._filled is None:
            return
        buffer, self._filled = self._filled, None
        used = buffer[: self._count * (1 + self._width)]
        sent = used.to(self._state.device, non_blocking=True) if self._state.on_gpu else used.clone()
        self._ring.append((buffer, recorded_event() if self._state.on_gpu else None))
        grid = (triton.cdiv(self._width, 1024), self._count)
        _put_rows_kernel[grid](self.words, sent, self._width, self._count, BLOCK=1024)

    def _free_buffer(self) -> torch.Tensor:
        if len(self._ring) < _MASK_BUFFERS:
            size = self._state.num_slots * (1 + self._width)
            return torch.empty(size, dtype=torch.int32, pin_memory=self._state.on_gpu)
        buffer, event = self._ring.popleft()
        if event is not None:
            event.synchronize()
        return buffer


class SlotEdits:
    """The arrays of all slots."""

    def __init__(self, state: DeviceState, vocab_size: int) -> None:
        self._state, self._vocab_size = state, vocab_size
        self._counts, self._bias = SlotRows(state, vocab_size), SlotRows(state, vocab_size)
        self.counts = self._counts.words
        self.bias = self._bias.words.view(torch.float32)
        self._masks = SlotMasks(state, -(-vocab_size // 32))
        self.masks = self._masks.words

    def set(self, slot: int, edits: LogitEdits) -> None:
        """A new sequence holds the slot."""
        self._state.set_edits(slot, flags_of(edits), edits)
        if edits.has_bias:
            fill = _EXCLUDED if edits.excludes_others else 0
            self._bias.replace(slot, fill, edits.bias_ids, np.asarray(edits.bias_amounts, dtype=np.float32))

    def set_history(self, slot: int, prompt: np.ndarray, output: Any) -> None:
        """Prompt and output of the slot, all tokens that it has drawn included."""
        known = np.asarray(output, dtype=np.int64)
        ids, index = np.unique(np.concatenate([np.asarray(prompt, dtype=np.int64), known]), return_inverse=True)
        counts = np.bincount(index[len(prompt) :], minlength=len(ids)).astype(np.int32)
        counts[index[: len(prompt)]] |= np.int32(IN_PROMPT)
        self._counts.replace(slot, 0, ids, counts)

    def mask_rows(self, slots: np.ndarray) -> np.ndarray:
        """i32[n, ceil(vocab / 32)] on the host: bits of the tokens that may follow, to be filled before `send`."""
        return self._masks.rows(slots)

    def send(self) -> None:
        """Send everything that was set since the last call."""
        self._counts.send()
        self._bias.send()
        self._masks.send()


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["sent"])
def _fill_rows_kernel(
    words: tl.tensor,  # i32[slots, width]
    sent: tl.tensor,  # i32[2, count]  slots, then a fill value for each
    width: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot, fill = tl.load(sent + tl.program_id(1)), tl.load(sent + count + tl.program_id(1))
    tl.store(words + slot.to(tl.int64) * width + column, tl.zeros((BLOCK,), tl.int32) + fill, mask=column < width)


@triton.jit(do_not_specialize=["width", "count"], do_not_specialize_on_alignment=["sent"])
def _put_rows_kernel(
    words: tl.tensor,  # i32[slots, width]
    sent: tl.tensor,  # i32[count + count * width]  slots, then their rows
    width: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    column, number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    row = tl.load(sent + count + number * width + column, mask=column < width, other=0)
    tl.store(words + tl.load(sent + number).to(tl.int64) * width + column, row, mask=column < width)


@triton.jit
def _penalised(
    values: tl.tensor, seen: tl.tensor, repetition: tl.tensor, presence: tl.tensor, frequency: tl.tensor
) -> tl.tensor:
    """Repetition penalty of all tokens seen, then presence and frequency penalty of those in the output."""
    changed = tl.where(values < 0.0, values * repetition, tl.div_rn(values, repetition))
    overflows = (values > -float("inf")) & (changed == -float("inf"))
    changed = tl.where(overflows, -3.4028234663852886e38, changed)  # unlikely, never impossible
    values = tl.where(seen != 0, changed, values)
    count = seen & 0x7FFFFFFF
    amount = (presence + frequency * count.to(tl.float64)).to(tl.float32)
    return tl.where(count > 0, values - amount, values)


@triton.jit(
    do_not_specialize=["mask_width", "num_slots"],
    do_not_specialize_on_alignment=[
        "rows", "lengths", "flags", "repetitions", "penalties", "min_lengths", "ends", "bias", "counts", "masks"
    ],
)  # fmt: skip
def _edit_kernel(
    logits: tl.tensor,  # f32[r, vocab]
    edited: tl.tensor,  # f32[r, vocab]
    rows: tl.tensor,  # i32[r]  slot of each row; -1: padding
    lengths: tl.tensor,  # i32[slots]  tokens in the cache before this step
    flags: tl.tensor,  # i32[slots]
    repetitions: tl.tensor,  # f32[slots]
    penalties: tl.tensor,  # f64[2, slots]  presence, frequency
    min_lengths: tl.tensor,  # i32[slots]
    ends: tl.tensor,  # i32[slots, MAX_ENDS]
    bias: tl.tensor,  # f32[slots, vocab]
    counts: tl.tensor,  # i32[slots, vocab]
    masks: tl.tensor,  # i32[slots, mask_width]
    vocab: tl.tensor,
    mask_width: tl.tensor,
    num_slots: tl.tensor,
    MAX_ENDS: tl.constexpr,
    IN_PLACE: tl.constexpr,  # `edited` are the logits: rows without edits stay as they are
    CHUNK: tl.constexpr,
) -> None:
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(rows + row)
    own = tl.maximum(slot, 0).to(tl.int64)
    kinds = tl.where(slot >= 0, tl.load(flags + own), 0)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = column < vocab
    wait_for_inputs()
    if (kinds != 0) | (not IN_PLACE):
        values = tl.load(logits + row * vocab + column, mask=inside, other=0.0)
        if (kinds & 1) != 0:
            values += tl.load(bias + own * vocab + column, mask=inside, other=0.0)
        if (kinds & 2) != 0:
            seen = tl.load(counts + own * vocab + column, mask=inside, other=0)
            presence, frequency = tl.load(penalties + own), tl.load(penalties + num_slots + own)
            values = _penalised(values, seen, tl.load(repetitions + own), presence, frequency)
        if ((kinds & 4) != 0) & (tl.load(lengths + own) + 1 < tl.load(min_lengths + own)):
            for index in tl.static_range(MAX_ENDS):
                values = tl.where(column == tl.load(ends + own * MAX_ENDS + index), -float("inf"), values)
        if (kinds & 8) != 0:
            bits = tl.load(masks + own * mask_width + column // 32, mask=inside, other=0)
            values = tl.where(((bits >> (column % 32)) & 1) != 0, values, -float("inf"))
        tl.store(edited + row * vocab + column, values, mask=inside)


def edit_logits(
    logits: torch.Tensor,  # f32[r, vocab]
    rows: torch.Tensor,  # i32[r]
    state: DeviceState,
    edits: SlotEdits,
    chunk: int,
    *,
    in_place: bool,
) -> torch.Tensor:
    """f32[r, vocab]: the logits after the edits of their slots."""
    num_rows, vocab = logits.shape
    edited = logits if in_place else torch.empty_like(logits)
    _edit_kernel[(triton.cdiv(vocab, chunk), num_rows)](
        logits, edited, rows, state.lengths, state.edit_flags, state.repetitions, state.penalties, state.min_lengths,
        state.ends, edits.bias, edits.counts, edits.masks, vocab, edits.masks.shape[1], state.num_slots,
        MAX_ENDS=MAX_ENDS, IN_PLACE=in_place, CHUNK=chunk, num_warps=8, **EXACT,
    )  # fmt: skip
    return edited
