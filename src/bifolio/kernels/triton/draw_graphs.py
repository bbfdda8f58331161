"""Draws as CUDA graphs, for passes that end with their logits: steps with prompts, drafts, or masks that come late.

The logits of a step are copied to static memory, in the order of its draws; a graph for each of a few numbers of draws
and each mode chooses the tokens there. Launched kernel by kernel, a draw with filters takes the host about a
millisecond.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bifolio.kernels.triton.cuda_graphs import TURNS, DeviceTokens, GraphRecorder
from bifolio.kernels.triton.device_state import DeviceState, recorded_event
from bifolio.kernels.triton.edits import SlotEdits
from bifolio.kernels.triton.sampling import Mode, Results, choose_tokens


def draw_sizes(most: int) -> list[int]:
    """Numbers of draws that graphs are captured for: smaller ones are padded to the next."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, max(most, 64) + 32, 32)]
    return [*(size for size in sizes if size < most), most]


@dataclass(slots=True)
class DrawStep:
    """The graph of one number of draws and its static inputs."""

    rows: torch.Tensor  # i32[r]  slot of each draw; -1: padding
    turn: torch.Tensor  # i32[1]  which part of `results` is written
    results: Results  # on the host; TURNS launches take turns
    graph: Any = None
    next_turn: int = 0


@dataclass(slots=True)
class DrawGraphs:
    """Launches draws from given logits."""

    state: DeviceState
    recorder: GraphRecorder  # with memory of its own: the logits of the step are read after the draw, too
    _logits: torch.Tensor | None = None  # f32[slots, vocab]
    _steps: dict[tuple[int, Mode], DrawStep] = field(default_factory=dict)  # by number of draws and mode
    _sizes: list[int] = field(init=False)  # numbers of draws

    def __post_init__(self) -> None:
        self._sizes = draw_sizes(self.state.num_slots)

    def draw(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, mode: Mode, edits: SlotEdits | None
    ) -> DeviceTokens:
        """Draw a token for each of `slots` from its row of the logits; pending changes of the slots are sent before."""
        count = len(slots)
        step = self._step(self._size(count), mode, edits, logits.shape[1])
        words = np.full(len(step.rows) + count, -1, dtype=np.int32)
        words[:count], words[len(step.rows) :] = slots, rows
        sent = self.state.send_words(words)
        step.rows.copy_(sent[: len(step.rows)])
        torch.index_select(logits, 0, sent[len(step.rows) :], out=self._room(logits.shape[1])[:count])
        if step.graph is None:
            self._run(step, mode, edits)
        else:
            step.graph.replay()
        turn, step.next_turn = step.next_turn, (step.next_turn + 1) % TURNS
        return DeviceTokens(step.results, turn, count, None if step.graph is None else recorded_event())

    def capture_all(self, mode: Mode, vocab_size: int, most: int | None = None) -> None:
        """Capture all numbers of draws (up to `most`) of a mode without edits now, the largest first."""
        for size in reversed(self._sizes):
            if most is None or size <= most:
                self._step(size, mode, None, vocab_size)

    def _size(self, count: int) -> int:
        if not self.state.on_gpu:
            return count  # each step runs kernel by kernel
        return self._sizes[bisect_left(self._sizes, count)]

    def _room(self, vocab_size: int) -> torch.Tensor:
        if self._logits is None:
            shape = self.state.num_slots, vocab_size
            self._logits = torch.zeros(shape, dtype=torch.float32, device=self.state.device)
        return self._logits

    def _step(self, size: int, mode: Mode, edits: SlotEdits | None, vocab_size: int) -> DrawStep:
        key = size, mode
        if key not in self._steps:
            self._room(vocab_size)
            rows = torch.full((size,), -1, dtype=torch.int32, device=self.state.device)
            turn = torch.zeros(1, dtype=torch.int32, device=self.state.device)
            step = DrawStep(rows, turn, Results.new(TURNS, size, mode, pinned=self.state.on_gpu))
            if self.state.on_gpu:
                step.graph = self.recorder.record(lambda: self._run(step, mode, edits))
                turn.zero_()  # recording took a turn
            self._steps[key] = step
        return self._steps[key]

    def _run(self, step: DrawStep, mode: Mode, edits: SlotEdits | None) -> None:
        logits = self._room(0)[: len(step.rows)]
        choose_tokens(logits, step.rows, self.state, step.turn, step.results, mode, edits)
        step.turn.add_(1).remainder_(TURNS)
