"""Commands between ranks: a batch arrives as it was sent, on every kernel set."""

from __future__ import annotations

import numpy as np
import pytest

from bifolio.cache.table_states import StatePass
from bifolio.engine.host_batch import HostBatch, Run
from bifolio.engine.parallel.commands import batch_of, read, run_command, write
from bifolio.kernels.interface import Adapter
from bifolio.long_rope import LONG_ROPE
from helpers import cpu_kernel_names, make_kernels

KERNELS = [  # the import of torch takes seconds
    pytest.param(name, marks=pytest.mark.full if name == "torch" else ()) for name in cpu_kernel_names()
]
TABLES = np.arange(12, dtype=np.int32).reshape(3, 4)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("has_states", [False, True])
def test_a_batch_arrives_as_it_was_sent(name: str, has_states: bool) -> None:
    """With its states, and the adapters of its tokens by their numbers."""
    kernels = make_kernels(name)
    states = [StatePass(3, ((0, 4),)), StatePass(0, ((2, 5), (4, 6)))] if has_states else None
    adapters = {40: Adapter(), 7: Adapter()} if has_states else {}
    first, second = adapters.values() or (None, None)
    runs = [Run(0, 7, [11], LONG_ROPE, first)], [Run(2, 0, [1, 2, 3, 4, 5], adapter=second)]
    sent = HostBatch.from_runs(*runs, TABLES, 4, [0, 5], states).to(kernels)
    memory = np.zeros(1 << 16, np.uint8)
    numbers = {adapter: number for number, adapter in adapters.items()}
    write(run_command(1, sent, kernels, numbers.__getitem__), memory)
    kind, found = batch_of(read(memory), kernels, adapters.__getitem__)
    assert (kind, found.max_position) == (1, 7)
    assert kernels.to_host(found.positions).tolist() == [LONG_ROPE + 7, 0, 1, 2, 3, 4]
    for name_of in ("token_ids", "positions", "cache_index", "logit_rows"):
        ours, theirs = (kernels.to_host(getattr(batch, name_of)) for batch in (found, sent))
        np.testing.assert_array_equal(ours, theirs)
    assert (found.states is not None) == (found.adapters is not None) == has_states
    if found.adapters is not None:
        assert found.adapters.loaded == (first, second)
        assert found.adapters.rows.tolist() == [0, 1, 1, 1, 1, 1]
    if found.states is not None and sent.states is not None:
        for ours, theirs in zip(found.states.arrays(), sent.states.arrays(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    for ours, theirs in zip(found.segments, sent.segments, strict=True):
        assert (ours.phase, ours.token_start, ours.token_end) == (theirs.phase, theirs.token_start, theirs.token_end)
        np.testing.assert_array_equal(ours.context_lens, theirs.context_lens)
