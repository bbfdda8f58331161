"""Native recurrences: the same bits on every instruction set and number of threads; extreme gates; large states."""

from __future__ import annotations

import numpy as np
import pytest
from native_support import isas, settings
from recurrence_cases import KINDS, new_recurrence, normal, state_batch, state_storage, states_of

from bifolio.kernels import native
from bifolio.kernels.interface import Recurrence
from bifolio.kernels.reference import ReferenceKernels

ISAS = isas()
STARTS, READS = [0, 1, 9, 10, 23], [0, 1, 2, 1]
WRITES = [3, *[-1] * 7, 4, 2, *[-1] * 6, 5, *[-1] * 5, 6]


def run(kernels: ReferenceKernels | native.NativeKernels, recurrence: Recurrence, rows: np.ndarray) -> list[np.ndarray]:
    """Four sequences, some of which continue random states: the results, and the states that they write."""
    storage = state_storage(kernels, recurrence, 7)
    rng = np.random.default_rng(9)
    for array in (storage.convolutions[1], storage.recurrent[1]):
        array[1:3] = normal(rng, *array[1:3].shape, scale=0.5)
    own = kernels.prepare_recurrence(recurrence)
    out = kernels.recur(rows, own, state_batch(kernels, STARTS, READS, WRITES), storage)
    return [out, *states_of(kernels, storage, recurrence, range(7))]


def equal(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", KINDS)
def test_instruction_sets_and_threads_give_equal_bits(name: str) -> None:
    kind, changes = KINDS[name]
    recurrence = new_recurrence(np.random.default_rng(5), kind, **changes)
    rows, expected = normal(np.random.default_rng(6), 23, recurrence.in_features), None
    for isa in ISAS:
        for threads in (1, 3):
            with settings(isa, threads):
                found = run(native.NativeKernels(threads=None), recurrence, rows)
            if expected is None:
                expected = found
            equal(found, expected)


@pytest.mark.parametrize("kind", ["delta", "keyed", "mamba"])
def test_extreme_gates(kind: str) -> None:
    """Steps that forget all or nothing, and gates that are open or closed, without infinities."""
    recurrence = new_recurrence(np.random.default_rng(5), kind)
    rows = normal(np.random.default_rng(6), 23, recurrence.in_features)
    gates = rows[:, recurrence.channels + recurrence.heads * recurrence.value_size :]
    gates[::3], gates[1::3] = 300.0, -300.0
    for ours, theirs in zip(
        run(native.NativeKernels(), recurrence, rows), run(ReferenceKernels(), recurrence, rows), strict=True
    ):
        assert np.isfinite(ours).all()
        np.testing.assert_allclose(ours, theirs, atol=2e-5 * max(1.0, np.abs(theirs).max()))


@pytest.mark.parametrize("kind", ["delta", "keyed", "rwkv"])
def test_the_state_of_a_real_model(kind: str) -> None:
    """Heads of 128 by 128, as in Qwen3.5 and Kimi-Linear, RWKV has 64 by 64; many tokens, so that errors would grow."""
    recurrence = new_recurrence(np.random.default_rng(5), kind, heads=4, groups=2, key_size=128, value_size=128)
    rows = normal(np.random.default_rng(6), 200, recurrence.in_features)
    results = []
    for kernels in (native.NativeKernels(), ReferenceKernels()):
        storage = state_storage(kernels, recurrence, 3)
        own = kernels.prepare_recurrence(recurrence)
        batch = state_batch(kernels, [0, 200], [0], [*[-1] * 99, 1, *[-1] * 99, 2])
        results.append([kernels.recur(rows, own, batch, storage), *states_of(kernels, storage, recurrence, [1, 2])])
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())
