"""Exchanges between ranks through shared memory: gathered columns, sums in the order of the ranks, and faults."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers import cpu_kernel_names

if "native" not in cpu_kernel_names():
    pytest.skip("the ranks need the compiled extension", allow_module_level=True)

from bifolio.kernels.cpu import SharedMemoryRanks, new_memory

COMMANDS = 4096


@pytest.fixture
def ranks() -> list[SharedMemoryRanks]:
    """Three ranks, each with its own mapping of the memory, as three processes have it."""
    file = new_memory(3, COMMANDS)
    made = [SharedMemoryRanks(file, rank, 3, COMMANDS) for rank in range(3)]
    os.close(file)
    return made


def together(ranks: list[SharedMemoryRanks], work: Callable[[SharedMemoryRanks], Any]) -> list[Any]:
    """The result or the error of each rank."""
    results: list[Any] = [None] * len(ranks)

    def run(rank: int) -> None:
        try:
            results[rank] = work(ranks[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


@pytest.mark.parametrize("rows", [0, 1, 5, 3000])  # 3000 rows take more than one exchange
def test_columns_of_unequal_widths_are_gathered(ranks: list[SharedMemoryRanks], rows: int) -> None:
    widths = (96, 31, 250)
    parts = [np.random.default_rng(rank).standard_normal((rows, widths[rank])).astype(np.float32) for rank in range(3)]
    for found in together(ranks, lambda rank: rank.all_gather(parts[rank.rank], widths)):
        np.testing.assert_array_equal(found, np.concatenate(parts, axis=1))


@pytest.mark.parametrize("rows", [1, 3000])
def test_sums_are_added_in_the_order_of_the_ranks(ranks: list[SharedMemoryRanks], rows: int) -> None:
    parts = [np.random.default_rng(rank).standard_normal((rows, 130)).astype(np.float32) for rank in range(3)]
    for found in together(ranks, lambda rank: rank.all_reduce(parts[rank.rank])):
        np.testing.assert_array_equal(found, (parts[0] + parts[1]) + parts[2])


def test_many_exchanges_in_a_row(ranks: list[SharedMemoryRanks]) -> None:
    """A rank that is ahead does not overwrite a part that another still reads."""

    def work(rank: SharedMemoryRanks) -> bool:
        for turn in range(400):
            found = rank.all_gather(np.full((2, 3), 10 * turn + rank.rank, np.float32), (3, 3, 3))
            if found[1, ::3].tolist() != [10 * turn, 10 * turn + 1, 10 * turn + 2]:
                return False
        return True

    assert together(ranks, work) == [True] * 3


def test_a_fault_ends_an_exchange_that_waits(ranks: list[SharedMemoryRanks]) -> None:
    def work(rank: SharedMemoryRanks) -> Any:
        if rank.rank == 2:
            rank.native.fault = 7
            return None
        return rank.all_reduce(np.ones((1, 4), np.float32))

    results = together(ranks, work)
    assert [type(result) for result in results] == [RuntimeError, RuntimeError, type(None)]
    assert "another rank" in str(results[0])


def test_ranks_continue_after_a_fault_with_equal_counters(ranks: list[SharedMemoryRanks]) -> None:
    test_a_fault_ends_an_exchange_that_waits(ranks)
    for rank in ranks:
        rank.native.count = 100
    ranks[0].native.fault = 0
    for found in together(ranks, lambda rank: rank.all_reduce(np.ones((1, 4), np.float32))):
        np.testing.assert_array_equal(found, np.full((1, 4), 3, np.float32))


def test_counters_pass_the_border_of_their_sign(ranks: list[SharedMemoryRanks]) -> None:
    for rank in ranks:
        rank.native.count = (1 << 31) - 3

    def work(rank: SharedMemoryRanks) -> list[float]:
        return [rank.all_reduce(np.full((1, 1), turn, np.float32)).item() for turn in range(6)]

    assert together(ranks, work) == [[3.0 * turn for turn in range(6)]] * 3


def test_a_signal_is_seen_by_another_rank(ranks: list[SharedMemoryRanks]) -> None:
    assert not ranks[1].native.wait(0, 1, 0.01)
    ranks[0].native.post(0, 1)
    assert ranks[1].native.wait(0, 1, 10.0)
    assert ranks[2].native.read(0) == 1
