"""Recurrent layers on the Triton kernels in deterministic mode, in the interpreter: passes of any size are equal."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from recurrence_cases import KINDS, new_recurrence, normal, recur_in_chunks, state_batch, state_storage, states_of

from bifolio.kernels.triton import TritonKernels


@pytest.mark.parametrize(
    "name", ["conv", "conv of width 7", "delta", "keyed", "lightning", "lru", "mamba", "rwkv", "selective", "shift"]
)
def test_passes_of_any_size_give_the_same(name: str) -> None:
    """Bit for bit: a token's program computes the same in every pass."""
    kind, changes = KINDS[name]
    kernels = TritonKernels("cpu", "f32", deterministic=True)
    recurrence = new_recurrence(np.random.default_rng(5), kind, **changes)
    rows, storage = normal(np.random.default_rng(6), 11, recurrence.in_features), state_storage(kernels, recurrence, 2)
    whole = recur_in_chunks(kernels, recurrence, rows, 11, storage)
    last = states_of(kernels, storage, recurrence, [1])
    for chunk in (1, 2, 3, 7):
        np.testing.assert_array_equal(recur_in_chunks(kernels, recurrence, rows, chunk, storage), whole)
        for ours, theirs in zip(states_of(kernels, storage, recurrence, [1]), last, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["selective", "lru"])
def test_scans_of_any_size_give_the_same(kind: str) -> None:
    """A recurrence by channel, bit for bit, whether its tokens come one by one or together."""
    kernels, rng = TritonKernels("cpu", "f32"), np.random.default_rng(7)
    recurrence = new_recurrence(rng, kind)
    rows = normal(rng, 11, recurrence.scan_features)
    own, found = kernels.prepare_recurrence(recurrence), []
    for chunk in (11, 1, 4):
        storage = state_storage(kernels, recurrence, 2)
        outputs = []
        for first in range(0, len(rows), chunk):
            part = rows[first : first + chunk]
            batch = state_batch(kernels, [0, len(part)], [1 if first else 0], [*[-1] * (len(part) - 1), 1])
            outputs.append(kernels.to_host(kernels.scan(kernels.from_host(part), own, batch, storage)))
        found.append((np.concatenate(outputs), kernels.to_host(storage.recurrent[1])[1].copy()))
    for outputs, state in found[1:]:
        np.testing.assert_array_equal(outputs, found[0][0])
        np.testing.assert_array_equal(state, found[0][1])
