"""The cache of captured passes, on a stand-in for a device: a graph is the pass itself, run again at each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from bifolio.kernels.triton.graphs.graph_cache import CapturedPass, GraphCache
from bifolio.kernels.triton.graphs.results import TURNS, TokenPass
from bifolio.kernels.triton.graphs.sizes import batch_sizes, draw_sizes, few_batch_sizes, padded
from bifolio.kernels.triton.sampling import Mode


class Replay:
    def __init__(self, run: Callable[[], None]) -> None:
        self.replay = run


class StandInCache(GraphCache):
    """Records on the host: a recorded pass has run twice, on padding."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.on_gpu, self.pools = True, list[str]()

    def record(self, run: Callable[[], None], pool: str) -> Replay:
        self.pools.append(pool)
        run()
        run()
        return Replay(run)


class One(NamedTuple):
    size: int


class Other(NamedTuple):
    size: int


class Counting(TokenPass):
    """Writes the number of its launch, as a device does: the turn is counted in the pass."""

    def __init__(self) -> None:
        super().__init__(1, Mode(), "cpu")
        self.input = torch.zeros(1, dtype=torch.int32)
        self.runs = 0

    def run(self) -> None:
        self.runs += 1
        self.ring.turn.add_(1).remainder_(TURNS)
        self.ring.results.chosen[int(self.ring.turn)] = self.input

    def event(self) -> None:
        return None


def test_a_pass_is_recorded_once_and_replayed_with_its_turns_in_order() -> None:
    cache = StandInCache()
    found: list[int] = []
    for number in range(3 * TURNS):
        step = cache.find(One(4), Counting)
        step.input.fill_(number)
        step.launch()
        found.append(int(step.tokens(1).wait()[0]))
    assert found == list(range(3 * TURNS))
    assert cache.find(One(4), Counting).runs == 2 + 3 * TURNS
    assert cache.pools == ["steps"]


def test_results_stay_while_other_steps_are_in_flight() -> None:
    step, pending = GraphCache("cpu").find(One(1), Counting), []
    for number in range(TURNS):
        step.input.fill_(number)
        step.launch()
        pending.append(step.tokens(1))
    assert [int(each.wait()[0]) for each in pending] == list(range(TURNS))


def test_keys_of_two_kinds_with_equal_fields_are_two_passes() -> None:
    cache = StandInCache()
    first, other = cache.find(One(2), Counting), cache.find(Other(2), Counting, "draws")
    assert first is not other
    assert cache.keys(One) == {One(2)}
    assert cache.passes(Other) == [other]
    assert cache.pools == ["steps", "draws"]


def test_released_passes_are_captured_again() -> None:
    cache = StandInCache()
    first: CapturedPass = cache.find(One(2), Counting)
    cache.release()
    assert cache.keys(One) == set()
    assert cache.find(One(2), Counting) is not first
    assert len(cache.pools) == 2


def test_sizes_have_room_for_every_batch() -> None:
    for sizes_up_to in (batch_sizes, few_batch_sizes, draw_sizes):
        for most in (1, 3, 8, 100, 256, 257, 1000):
            sizes = sizes_up_to(most)
            assert sizes == sorted(set(sizes))
            assert sizes[-1] == most
            assert all(padded(sizes, count) >= count for count in range(1, most + 1))
    assert np.array_equal([padded((1, 2, 4), count) for count in (1, 2, 3, 4)], [1, 2, 4, 4])
