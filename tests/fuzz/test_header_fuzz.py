"""A thousand mutated headers of every kind of model file; `python -m tests.fuzz.header_fuzzer` runs more."""

from __future__ import annotations

import pytest
from header_fuzzer import ALLOWANCE, run_cases


@pytest.mark.full
def test_mutated_headers_open_or_are_refused_by_name() -> None:
    report = run_cases(1000, seed=1)
    assert report.failures == []
    assert report.outcomes["opened"] < 500, report.outcomes  # the mutations do damage
    assert report.outcomes["ModelFileError"] > 300, report.outcomes
    assert report.resident_growth < ALLOWANCE
