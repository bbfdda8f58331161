"""`bifolio profile`: a table, JSON, a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bifolio.cli.main import build_app
from bifolio.measure import profiler
from bifolio.measure.machine import MachineLimits
from cli_runner import CliRunner

ARGUMENTS = ["profile", "--shape", "tiny", "--kernels", "reference", "-p", "16", "-n", "3"]


@pytest.fixture(autouse=True)
def given_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = MachineLimits(2e10, 3e10, "reads", "products")
    monkeypatch.setattr(profiler, "measure_limits", lambda *_: limits)


def run(*options: str) -> str:
    result = CliRunner().invoke(build_app(), [*ARGUMENTS, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_both_phases_and_the_limits_are_shown() -> None:
    printed = run()
    for word in ("prefill", "decode", "projections", "attention", "MLP", "sampling", "recording", "20 GB/s"):
        assert word in printed, word


@pytest.mark.full
def test_json_and_picture(tmp_path: Path) -> None:
    picture = tmp_path / "profile.png"
    record = json.loads(run("--json", "--plot", str(picture)))
    assert record["limits"]["flops_per_second"] == 3e10
    assert record["decode"]["num_tokens"] == 3
    assert record["prefill"]["parts"]["MLP"]["flops"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
