"""The pace of updates: every step with few streams, less often with many, and never too rarely."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bifolio.kernels.reference import ReferenceKernels
from bifolio.serve.process.update_pace import MAX_SECONDS, UPDATES, UPDATES_BESIDE_KERNELS, UpdatePace


class Device(ReferenceKernels):
    launches_ahead = True


@pytest.mark.parametrize(("kernels", "rate"), [(ReferenceKernels(), UPDATES_BESIDE_KERNELS), (Device(), UPDATES)])
def test_the_default_depends_on_the_device(kernels: ReferenceKernels, rate: float) -> None:
    assert UpdatePace.of(kernels, None).per_second == rate
    assert UpdatePace.of(kernels, 7.0).per_second == 7.0


@given(st.integers(1, 1000), st.floats(1.0, 5000.0), st.floats(0.0005, 0.05))
def test_updates_stay_within_their_rate_and_streams_are_never_silent_for_long(
    num_streams: int, rate: float, step: float
) -> None:
    pace, now, sent = UpdatePace(rate), 100.0, []
    for _ in range(400):
        now += step
        if pace.is_due(now, num_streams):
            sent.append(now)
    gaps = [later - earlier for earlier, later in pairwise(sent)]
    assert all(gap >= min(num_streams / rate, MAX_SECONDS) - 1e-9 for gap in gaps)
    assert all(gap < min(num_streams / rate, MAX_SECONDS) + step + 1e-9 for gap in gaps)
    assert sent[0] == 100.0 + step
