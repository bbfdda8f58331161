"""Tokens of captured passes: a ring of results in host memory, which the device writes itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bifolio.kernels.interface import TokenScores
from bifolio.kernels.triton.graphs.graph_cache import CapturedPass
from bifolio.kernels.triton.logprobs import read_scores
from bifolio.kernels.triton.sampling import Mode, Results

TURNS = 4  # results of a pass that lie in host memory at once; more than the steps that are ever in flight


class Ring:
    """The results of one draw: TURNS launches take turns. The device counts them as the host does."""

    def __init__(self, size: int, mode: Mode | None, device: str) -> None:
        self.results = Results.new(TURNS, size, mode, pinned=device.startswith("cuda"))
        self.turn = torch.full((1,), TURNS - 1, dtype=torch.int32, device=device)  # of the last launch
        self._next = 0

    def restart(self) -> None:
        """Recording the pass took a turn."""
        self.turn.fill_(TURNS - 1)

    def take(self) -> int:
        """Which part of the results the launch has written that was just made."""
        turn, self._next = self._next, (self._next + 1) % TURNS
        return turn


class TokenPass(CapturedPass):
    """A pass that samples tokens."""

    def __init__(self, size: int, mode: Mode | None, device: str) -> None:
        self.ring = Ring(size, mode, device)
        self.mode = mode

    def recorded(self) -> None:
        self.ring.restart()

    def tokens(self, count: int, order: np.ndarray | None = None) -> DeviceTokens:
        """The tokens of the launch that was just made."""
        return DeviceTokens(self.ring.results, self.ring.take(), count, self.event(), order)


@dataclass(slots=True)
class DeviceTokens:
    """Tokens of a launched pass, in flight."""

    results: Results
    turn: int
    count: int
    event: Any = None  # comes when the results are on the host
    order: np.ndarray | None = None  # i64[count]  row of each token in the order of the launch; None: as they are

    def wait(self) -> np.ndarray:
        """i32[count]"""
        if self.event is not None:
            self.event.synchronize()
        return self._own(self.results.chosen)

    def scores(self) -> TokenScores | None:
        return None if self.results.scores is None else read_scores(self._own(self.results.scores))

    def _own(self, results: torch.Tensor) -> np.ndarray:
        own: np.ndarray = results[self.turn].numpy()[: self.count]
        return own.copy() if self.order is None else own[self.order]


@dataclass(slots=True)
class PendingDrafts:
    """Draft tokens in flight."""

    rings: list[Ring]
    turn: int
    count: int
    event: Any = None

    def wait(self) -> np.ndarray:
        """i32[n, length]; -1 where no token can be sampled."""
        if self.event is not None:
            self.event.synchronize()
        return np.stack([each.results.chosen[self.turn].numpy()[: self.count] for each in self.rings], axis=1)
