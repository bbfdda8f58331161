"""Random lives on shared tiers and snapshots (`tier_lives`): restored bits are computed bits, and nothing is left."""

from __future__ import annotations

import os

import pytest
from tier_lives import Models, computed_truth, run_lives

LIVES = int(os.environ.get("BIFOLIO_TIER_LIVES", "1000"))


@pytest.mark.slow
def test_random_lives_of_all_kinds_of_models() -> None:
    models = Models.new()
    computed_truth(models)
    report = run_lives(models, LIVES)
    assert not report.failures, report.failures[0]
    assert report.killed > LIVES // 10
    assert report.counts["hits tokens"] > LIVES
    assert report.counts["restored tokens"] > 0


@pytest.mark.full
def test_some_lives_of_a_plain_and_a_hybrid_model() -> None:
    models = Models.new(("dense", "delta"))
    computed_truth(models)
    report = run_lives(models, 12, seed=2)
    assert not report.failures, report.failures[0]
    assert report.counts["answer"] > 20
