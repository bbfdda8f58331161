"""The soak test judges runs, and a short run passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bifolio.measure.soak import Sample, Soak, SoakPlan, SoakReport
from bifolio.measure.soak_bombs import BOMBS
from bifolio.measure.soak_plot import plot_soak


def good() -> SoakReport:
    samples = [Sample(float(second), 100.0, 20, 10) for second in range(60)]
    return SoakReport(seconds=1800.0, answers=[(1.0, 0.1)] * 10, samples=samples)


@pytest.mark.full
def test_a_good_run_has_no_problem(tmp_path: Path) -> None:
    report = good()
    report.judge(SoakPlan(kill_every=0))
    assert report.problems == []
    assert report.growth == pytest.approx(0.0, abs=1e-6)
    plot_soak(report, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(report.as_dict())


@pytest.mark.parametrize("name", ["wrong", "slow", "grows", "blocks", "descriptors", "silent"])
def test_every_law_can_fail(name: str) -> None:
    report = good()
    if name == "wrong":
        report.wrong.append("a text")
    elif name == "slow":
        report.answers.append((2.0, 99.0))
    elif name == "grows":
        report.samples = [Sample(float(second), 100.0 + 2 * second, 20, 10) for second in range(60)]
    elif name == "blocks":
        report.used_blocks = 0.25
    elif name == "descriptors":
        report.samples[-1] = Sample(60.0, 100.0, 500, 10)
    else:
        report.answers.clear()
    report.judge(SoakPlan(kill_every=0))
    assert len(report.problems) == 1


def test_the_first_minute_and_restarts_are_no_growth() -> None:
    """Memory that rises in every life of the engine and falls with its end has no slope; a leak below it has."""

    def run(leak: float) -> SoakReport:
        samples = []
        for second in range(1800):
            engine = 80.0 + second % 45 + (40.0 if second < 60 else 0.0)
            samples.append(
                Sample(float(second), engine + leak * second, 20, 10, {"engine": engine, "front end": leak * second})
            )
        return SoakReport(seconds=1800.0, answers=[(1.0, 0.1)], samples=samples)

    assert run(0.0).growth == pytest.approx(0.0, abs=0.1)
    assert run(0.05).growth_of_parts["front end"] == pytest.approx(3.0)
    leaking = run(0.05)
    leaking.judge(SoakPlan())
    assert len(leaking.problems) == 1


def test_bombs_have_names_of_their_own() -> None:
    assert len({bomb.name for bomb in BOMBS}) == len(BOMBS)
    assert all(json.dumps(bomb.body()) for bomb in BOMBS)


@pytest.mark.slow
def test_a_short_run_passes() -> None:
    report = Soak(SoakPlan(seconds=30.0, kill_every=12.0, oracle_clients=2, chaos_clients=1)).run()
    assert report.problems == []
    assert report.kills
