"""Draws at several positions of the same slots, for drafts: each draw has a copy of its slot's sampling parameters.

slots    |  3  |  3  |  3  |  7  |  7  |     of the batch; neither their lengths nor their newest tokens change
draws    |  0  |  1  |  2  |  3  |  4  |     slots of a state of their own, at the lengths before each position
"""

from __future__ import annotations

import numpy as np
import torch

from bifolio.kernels.triton.cuda_graphs import DeviceTokens, GraphRecorder
from bifolio.kernels.triton.device_state import DeviceState
from bifolio.kernels.triton.draw_graphs import DrawGraphs
from bifolio.kernels.triton.sampling import Mode

MOST = 128  # draws of a step; logits of so many rows are kept


class DraftDraws:
    """Draws from given logits on copies of slots."""

    def __init__(self, source: DeviceState) -> None:
        self._source = source
        self._state = DeviceState(MOST, 0, source.device)
        self._graphs = DrawGraphs(self._state, GraphRecorder(source.device))

    def draw(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, positions: np.ndarray, mode: Mode
    ) -> DeviceTokens:
        """Draw the token at `positions[i]` of `slots[i]` from `logits[rows[i]]`; `MOST` at most."""
        sent = self._source.send_words(np.concatenate([slots, positions - 1]).astype(np.int32))
        copy_sampling(self._source, sent[: len(slots)], self._state, sent[len(slots) :])
        return self._graphs.draw(logits, rows, np.arange(len(slots)), mode, None)

    def capture_all(self, mode: Mode, vocab_size: int, most: int) -> None:
        """Capture numbers of draws up to `most` of a mode now."""
        self._graphs.capture_all(mode, vocab_size, most)


def copy_sampling(source: DeviceState, slots: torch.Tensor, target: DeviceState, lengths: torch.Tensor) -> None:
    """Let the first slots of `target` sample like `slots` (i32[n]) of `source`, at these lengths (i32[n])."""
    count = len(slots)
    for theirs, own in zip(source.columns, target.columns, strict=True):
        own[:, :count] = theirs.index_select(1, slots)
    target.lengths[:count] = lengths
