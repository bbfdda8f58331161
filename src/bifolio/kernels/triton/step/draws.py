"""Draws from given logits: of steps with prompts, of drafts, or of steps whose masks come late.

The logits of a step are copied to static memory, in the order of its draws; a captured pass for each of a few numbers
of draws and each mode chooses the tokens there. Launched kernel by kernel, a draw with filters takes the host about a
millisecond. `DraftDraws` draws at several positions of the same slots:

    slots    |  3  |  3  |  3  |  7  |  7  |     of the batch; neither their lengths nor their newest tokens change
    draws    |  0  |  1  |  2  |  3  |  4  |     slots of a state of their own, at the lengths before each position
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.edits import SlotEdits
from bifolio.kernels.triton.graphs.graph_cache import GraphCache
from bifolio.kernels.triton.graphs.results import TURNS, DeviceTokens, TokenPass
from bifolio.kernels.triton.graphs.sizes import draw_sizes, padded
from bifolio.kernels.triton.sampling import Mode, choose_tokens

MOST = 128  # draws of drafts in a step; logits of this number of rows are kept


class DrawKey(NamedTuple):
    """Draws from given logits."""

    size: int
    mode: Mode
    of_drafts: bool


class DrawPass(TokenPass):
    """Draws of one key."""

    def __init__(self, state: DeviceState, key: DrawKey, logits: torch.Tensor, edits: SlotEdits | None) -> None:
        super().__init__(key.size, key.mode, state.device)
        self._state, self._edits, self._draw_mode = state, edits, key.mode
        self._logits = logits[: key.size]
        self.rows = torch.full((key.size,), -1, dtype=torch.int32, device=state.device)  # i32[r]  slots; -1: padding

    def run(self) -> None:
        self.ring.turn.add_(1).remainder_(TURNS)
        choose_tokens(
            self._logits, self.rows, self._state, self.ring.turn, self.ring.results, self._draw_mode, self._edits
        )


class Draws:
    """Launches draws for slots of a state."""

    def __init__(self, state: DeviceState, cache: GraphCache, *, of_drafts: bool = False) -> None:
        self.state, self._cache, self._of_drafts = state, cache, of_drafts
        self._logits: torch.Tensor | None = None  # f32[slots, vocab]
        self._sizes = draw_sizes(state.num_slots)

    def draw(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, mode: Mode, edits: SlotEdits | None
    ) -> DeviceTokens:
        """Draw a token for each of `slots` from its row of the logits; pending changes of the slots are sent before."""
        count, room = len(slots), self._room(logits.shape[1])
        size = padded(self._sizes, count) if self.state.on_gpu else count
        step = self._step(DrawKey(size, mode, self._of_drafts), edits, room)
        words = np.full(size + count, -1, dtype=np.int32)
        words[:count], words[size:] = slots, rows
        sent = self.state.send_words(words)
        step.rows.copy_(sent[:size])
        torch.index_select(logits, 0, sent[size:], out=room[:count])
        step.launch()
        return step.tokens(count)

    def capture_all(self, mode: Mode, vocab_size: int) -> None:
        """Capture all numbers of draws of a mode without edits now, the largest first."""
        for size in reversed(self._sizes):
            self._step(DrawKey(size, mode, self._of_drafts), None, self._room(vocab_size))

    def _room(self, vocab_size: int) -> torch.Tensor:
        if self._logits is None:
            shape = self.state.num_slots, vocab_size
            self._logits = torch.zeros(shape, dtype=torch.float32, device=self.state.device)
        return self._logits

    def _step(self, key: DrawKey, edits: SlotEdits | None, room: torch.Tensor) -> DrawPass:
        # A pool of its own: the logits of the step are read after the draw, too.
        return self._cache.find(key, lambda: DrawPass(self.state, key, room, edits), "draws")


class DraftDraws:
    """Draws from given logits on copies of slots."""

    def __init__(self, source: DeviceState, cache: GraphCache) -> None:
        self._source = source
        self._draws = Draws(DeviceState(MOST, 0, source.device), cache, of_drafts=True)

    def draw(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray, mode: Mode
    ) -> DeviceTokens:
        """Draw the token at `positions[i]` of `slots[i]` from `logits[rows[i]]`; `MOST` at most."""
        count, own = len(slots), self._draws.state
        sent = self._source.send_words(np.concatenate([slots, positions - 1]).astype(np.int32))
        copy_columns(self._source, sent[:count], own)
        own.lengths[:count] = sent[count:]
        return self._draws.draw(logits, rows, np.arange(count), mode, None)


def copy_columns(source: DeviceState, slots: torch.Tensor, target: DeviceState) -> None:
    """Let the first slots of `target` be like `slots` (i32[n]) of `source` in all but their blocks."""
    for theirs, own in zip(source.columns, target.columns, strict=True):
        own[:, : len(slots)] = theirs.index_select(1, slots)
