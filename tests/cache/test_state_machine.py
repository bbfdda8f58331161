"""Random use of the cache against a plain model.

The everyday run is short and always the same. The thorough one, with new cases every time:
BIFOLIO_MACHINE_RUNS=300 BIFOLIO_MACHINE_STEPS=100 pytest tests/cache/test_state_machine.py
"""

from __future__ import annotations

import os

import pytest
from cache_machine import CacheMachine
from hypothesis import HealthCheck, Phase, settings

RUNS = os.environ.get("BIFOLIO_MACHINE_RUNS")
STEPS = int(os.environ.get("BIFOLIO_MACHINE_STEPS", "60"))
# the seeded-bug run wants to know whether a bug is found, not its smallest example
PHASES = [Phase.explicit, Phase.generate] + (
    [Phase.shrink] if os.environ.get("BIFOLIO_MACHINE_SHRINK", "1") == "1" else []
)

TestCacheMachine = pytest.mark.full(pytest.mark.timeout(0)(CacheMachine.TestCase))
TestCacheMachine.settings = settings(
    max_examples=int(RUNS or 80),
    stateful_step_count=STEPS,
    phases=PHASES,
    derandomize=RUNS is None,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
