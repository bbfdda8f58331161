"""Exactness of `recur`: a sequence's results and states do not depend on the passes, nor on other sequences."""

from __future__ import annotations

import numpy as np
import pytest
from recurrence_cases import KINDS, new_recurrence, normal, recur_in_chunks, state_batch, state_storage, states_of

from bifolio.kernels.interface import KernelSet, Recurrence
from helpers import cpu_kernel_names, make_kernels

EXACT = [name for name in cpu_kernel_names() if name != "torch"]  # torch chooses its loops by the number of tokens


@pytest.fixture(scope="module", params=EXACT)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return make_kernels(request.param)


@pytest.fixture(params=KINDS)
def recurrence(request: pytest.FixtureRequest) -> Recurrence:
    kind, changes = KINDS[request.param]
    return new_recurrence(np.random.default_rng(5), kind, **changes)


def rows_of(recurrence: Recurrence, tokens: int = 27, seed: int = 6) -> np.ndarray:
    return normal(np.random.default_rng(seed), tokens, recurrence.in_features)


def test_passes_of_any_size_give_equal_bits(kernels: KernelSet, recurrence: Recurrence) -> None:
    rows, storage = rows_of(recurrence), state_storage(kernels, recurrence, 2)
    whole = recur_in_chunks(kernels, recurrence, rows, len(rows), storage)
    last = states_of(kernels, storage, recurrence, [1])
    for chunk in range(1, 14):
        np.testing.assert_array_equal(recur_in_chunks(kernels, recurrence, rows, chunk, storage), whole)
        for ours, theirs in zip(states_of(kernels, storage, recurrence, [1]), last, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_state_written_after_any_token_is_that_of_a_pass_that_ends_there(
    kernels: KernelSet, recurrence: Recurrence
) -> None:
    rows, storage = rows_of(recurrence, 9), state_storage(kernels, recurrence, 11)
    own = kernels.prepare_recurrence(recurrence)
    kernels.recur(rows, own, state_batch(kernels, [0, 9], [0], list(range(2, 11))), storage)
    written = states_of(kernels, storage, recurrence, range(2, 11))
    for end in range(1, 10):
        recur_in_chunks(kernels, recurrence, rows[:end], end, storage)
        for ours, theirs in zip(states_of(kernels, storage, recurrence, [1]), written, strict=True):
            np.testing.assert_array_equal(ours[0], theirs[end - 1])


def test_sequences_in_one_pass_equal_sequences_alone(kernels: KernelSet, recurrence: Recurrence) -> None:
    """Two sequences continue one state, a third another, a fourth none; one writes the state it read."""
    rows, storage = rows_of(recurrence, 30), state_storage(kernels, recurrence, 9)
    own = kernels.prepare_recurrence(recurrence)
    recur_in_chunks(kernels, recurrence, rows[:7], 7, storage, state=1)
    recur_in_chunks(kernels, recurrence, rows[7:11], 2, storage, state=2)
    starts, reads, targets = [11, 12, 17, 18, 30], [1, 1, 2, 0], [5, 6, 2, 8]
    alone = []
    for i, target in enumerate(targets):
        count = starts[i + 1] - starts[i]
        single = state_storage(kernels, recurrence, 9)
        for arrays, own_arrays in ((single.convolutions, storage.convolutions), (single.recurrent, storage.recurrent)):
            arrays[1][:] = own_arrays[1]
        batch = state_batch(kernels, [0, count], [reads[i]], [*[-1] * (count - 1), target])
        y = kernels.recur(rows[starts[i] : starts[i + 1]], own, batch, single)
        alone.append((y, states_of(kernels, single, recurrence, [target])))
    writes = np.full(19, -1)
    writes[np.array(starts[1:]) - 12] = targets
    batch = state_batch(kernels, [start - 11 for start in starts], reads, writes.tolist())
    together = kernels.recur(rows[11:], own, batch, storage)
    np.testing.assert_array_equal(together, np.concatenate([y for y, _ in alone]))
    for target, (_, states) in zip(targets, alone, strict=True):
        for ours, theirs in zip(states_of(kernels, storage, recurrence, [target]), states, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_an_empty_state_is_not_read_from_the_storage(kernels: KernelSet) -> None:
    """State 0 needs no entry of zeros: a pass without a cache gives the same."""
    recurrence = new_recurrence(np.random.default_rng(5), "delta")
    rows, own = rows_of(recurrence, 5), kernels.prepare_recurrence(recurrence)
    storage = state_storage(kernels, recurrence, 2)
    batch = state_batch(kernels, [0, 5], [0], [-1] * 5)
    np.testing.assert_array_equal(kernels.recur(rows, own, batch, storage), kernels.recur(rows, own, batch, None))
